"""What a method is called where people read of it."""

CENTRALISED = "centralised"
"""The first word of what was trained with all data in one place: no federated method, whatever rules it ran with."""

ALONE = {"fedavg": "SGD", "fedsam": "SAM"}
"""What remains of a federated method with one client that has everything."""


def method_name(algorithm: str, split: str) -> str:
    """What readers call a method on a split.

    Args:
        algorithm: Its name in the settings.
        split: The split in the settings.
    """
    return f"{CENTRALISED} {ALONE.get(algorithm, algorithm)}" if split == "pooled" else algorithm


def is_centralised(method: str) -> bool:
    """Whether a name of `method_name` is of training with all data in one place.

    Args:
        method: The name.
    """
    return method.startswith(f"{CENTRALISED} ")
