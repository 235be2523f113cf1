"""The choices of settings: signatures, flags, completion, files and messages derive from these types.

Imports no PyTorch.
"""

from typing import Literal

ClipScope = Literal["loss", "corrected"]
"""What is clipped: the loss gradient, or the gradient with its correction."""
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
