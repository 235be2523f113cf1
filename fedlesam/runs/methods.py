"""What a method is called where people read of it."""

CENTRALISED = "centralised"
"""The first word of what was trained with all data in one place: no federated method, whatever rules it ran with."""

ALONE = {"fedavg": "SGD", "fedsam": "SAM"}
"""What remains of a federated method with one client that has everything."""


def method_name(algorithm: str, split: str) -> str:
    return f"{CENTRALISED} {ALONE.get(algorithm, algorithm)}" if split == "pooled" else algorithm


def is_centralised(method: str) -> bool:
    return method.startswith(f"{CENTRALISED} ")
