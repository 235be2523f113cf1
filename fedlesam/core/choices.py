"""The choices and ranges of settings: signatures, flags, completion, files and messages derive from these.

Imports no PyTorch.
"""

from typing import Literal

from fedlesam.core.checks import Range

ClipScope = Literal["loss", "corrected"]
"""What is clipped: the loss gradient, or the gradient with its correction."""
Optimizer = Literal["sgd", "adamw"]
"""How a client steps along its gradients."""
Weighting = Literal["clients", "examples"]
"""How the server weights its clients."""
OnError = Literal["drop", "stop"]
"""What happens to a client that raises or whose numbers are not finite."""
Precision = Literal["fp32", "bf16"]
"""bf16: the forward pass under autocast; weights, gradients and sums stay as they are."""
Engine = Literal["plain", "stacked"]
"""How the clients of a round are computed."""
StoreKind = Literal["shared", "pinned"]
"""Where clients' memories are with several workers."""

RANGES: dict[str, Range] = {
    "batch_size": {"at_least": 1, "whole": True},
    "dropout": {"at_least": 0, "at_most": 1},
    "workers": {"at_least": 1, "whole": True},
    "threads": {"at_least": 1, "at_most": 1024, "whole": True},  # beyond it their own memory ends the process
    "memory": {"at_least": 0, "whole": True},
    "stack_runs": {"at_least": 8, "at_most": 4096, "whole": True},
}
"""Of the numbers that the library's objects and the settings of a run both have."""
