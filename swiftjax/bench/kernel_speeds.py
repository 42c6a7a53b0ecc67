"""Speeds of the attention kernels as figures; `kernels/measure.py` takes and checks them."""

from collections.abc import Iterator

from swiftjax import kernels
from swiftjax.bench.records import Figure
from swiftjax.kernels.measure import measure_all


def measure_kernels(implementation: kernels.Implementation) -> Iterator[Figure]:
    """Every shape against the ceilings of the same run; a wrong or unreal result raises."""
    for measured in measure_all(implementation):
        yield Figure(
            workload=measured.workload, batch=measured.batch, context=measured.context,
            value=measured.value, unit=measured.unit, spread=measured.spread, limit=measured.limit,
            details={
                "microseconds": round(measured.microseconds, 2),
                "error": float(f"{measured.error:.2g}"),
            },
        )  # fmt: skip
