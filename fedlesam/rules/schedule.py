"""Hyper-parameters that follow the rounds."""

START = 0.001
"""What a radius begins with while it grows."""


def ramp(rho: float, warmup: int, round: int) -> float:
    """FedGloss's growing radius: START + (rho - START) * min(1, round / warmup); without a warm-up, or for 0, rho.

    Args:
        rho: The radius in the end.
        warmup: The rounds in which it grows.
        round: From 0.
    """
    return START + (rho - START) * min(1.0, round / warmup) if warmup and rho else rho
