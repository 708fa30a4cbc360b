"""What a step costs, read from its compiled program: FLOPs, memory and communication."""

from typing import TYPE_CHECKING

from stepfold.lazy import attach

if TYPE_CHECKING:
    from stepfold.inspect.choose import choose, choose_remat
    from stepfold.inspect.compiled import CompiledStep, compile_step
    from stepfold.inspect.report import Report, describe, parameter_table

__all__ = [
    "CompiledStep",
    "Report",
    "choose",
    "choose_remat",
    "compile_step",
    "describe",
    "parameter_table",
]
__getattr__, __dir__ = attach(
    __name__,
    {
        "inspect.choose": "choose choose_remat",
        "inspect.compiled": "CompiledStep compile_step",
        "inspect.report": "Report describe parameter_table",
    },
)
