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
Precision = Literal["fp32", "tf32", "bf16", "bf16-pure"]
"""Of forward and backward passes; weights, what rules compute, messages and sums stay as they are.

tf32: products in TensorFloat-32, on GPUs that have it. bf16: under autocast. bf16-pure: weights, activations and
gradients in bfloat16."""
Engine = Literal["plain", "stacked"]
"""How the clients of a round are computed."""
StoreKind = Literal["shared", "pinned"]
"""Where clients' memories are with several workers."""

RANGES: dict[str, Range] = {
    "batch_size": {"at_least": 1, "whole": True},
    "dropout": {"at_least": 0, "below": 1},  # at 1 nobody would ever answer
    "workers": {"at_least": 1, "whole": True},
    "threads": {"at_least": 1, "at_most": 1024, "whole": True},  # beyond it their own memory ends the process
    "memory": {"at_least": 0, "whole": True},
    "stack_runs": {"at_least": 8, "at_most": 4096, "whole": True},
}
"""Of the numbers that the library's objects and the settings of a run both have."""
