"""How long kernels and blocks should take, by the TPU's compiler, in a process of its own.

A process has one `tpu` device: the one that predicts has the emulated one, whatever the machine has.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

from . import environment
from .lab.ahead_of_time import TOPOLOGIES
from .verify_cases import Size, timed_case


def predict_cycles(
    names: tuple[str, ...], size: Size, generation: str, kernel_repo: str | None
) -> dict[str, int]:
    """Executed cycles by name, on one chip. Raises EmulatorError if the emulated device cannot start."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, environment.configure_without_tpu) as executor:
        return {
            name: executor.submit(_predict, name, size, generation, kernel_repo).result() for name in names
        }


def _predict(name: str, size: Size, generation: str, kernel_repo: str | None) -> int:
    from . import emulator
    from .emulator.capture import capture
    from .lab.compiled_program import compile_program

    environment.take_generation(generation)
    emulator.start()
    function, inputs, keywords = timed_case(name, size, "kernel", kernel_repo)
    program = capture(function, *inputs, **keywords)
    return compile_program(program, TOPOLOGIES[generation]).schedule.cycles
