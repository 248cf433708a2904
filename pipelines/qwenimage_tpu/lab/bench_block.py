"""One QwenImage transformer block as torch-tpu compiles it: stock, and on our kernels.

Both are captured from torch-tpu on the emulated device and compiled by the TPU's compiler, with real Pallas
kernels inside; nothing runs. Cycles are executed bundles: waiting for memory is not in them. Beside them
stand the bytes that each kernel's copies move from and to HBM, and how many cycles these take at the
published bandwidth. What XLA keeps in VMEM between two kernels moves nothing.
"""

from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import torch
from diffusers import QwenImageTransformer2DModel
from rich.console import Console
from rich.table import Table

from qwenimage_tpu.emulator.capture import capture
from qwenimage_tpu.kernel_loader import load_kernels
from qwenimage_tpu.modulation import ModulationTable
from qwenimage_tpu_pallas.layouts import HEAD_DIM
from qwenimage_tpu_pallas.shapes import HEADS, JointShape

from .ahead_of_time import CLOCK_HZ, TOPOLOGIES
from .attention_floor import MATRIX_UNITS, matmul_floor
from .compiled_program import CompiledProgram, compile_program
from .hardware import CORES, HBM_BYTES_PER_SECOND
from .program import Program

IMAGE_ROW = 64  # image tokens in a row; how they are arranged changes no shape
MLP_RATIO = 4
SMALLEST_SHARE = 0.001  # of a block's cycles, to get a row of its own
MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class BlockCase:
    """One block of the base model: its shape, and whether it is patched with our kernels.

    shards: chips that share it by tensor parallelism; the block is then what one of them has, and the sums
    over all of them are left out.
    """

    shape: JointShape
    heads: int = HEADS
    shards: int = 1
    patched: bool = True
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        return "on our kernels" if self.patched else "stock diffusers"


def check_block(heads: int, shards: int, image_tokens: int, text_tokens: int, generation: str) -> JointShape:
    """The shape. Raises ValueError for one that the block does not take, and for an unknown generation."""
    if heads < 1 or text_tokens < 1:
        raise ValueError(f"heads and text tokens must be at least 1, but are {heads} and {text_tokens}")
    if shards < 1 or heads % shards:
        raise ValueError(f"tensor parallelism must divide the {heads} heads, but is over {shards} chips")
    if image_tokens < 1 or image_tokens % IMAGE_ROW:
        raise ValueError(f"image tokens must be a positive multiple of {IMAGE_ROW}, but are {image_tokens}")
    if generation not in TOPOLOGIES:
        raise ValueError(f"the TPU generation must be one of {sorted(TOPOLOGIES)}, but is {generation!r}")
    return JointShape(image_tokens, text_tokens)


def block_floor(generation: str, case: BlockCase) -> int:
    """Cycles on each core that the block's matrix products take at least in the compiler's schedule."""
    units, channels = MATRIX_UNITS[generation], case.heads * HEAD_DIM
    shared, hidden = channels // case.shards, MLP_RATIO * channels // case.shards
    rows = case.shape.image_tokens + case.shape.text_tokens
    registers = sum(
        units.registers(rows, depth, columns)
        for depth, columns in (
            *((channels, shared),) * 3,
            (shared, channels),
            (channels, hidden),
            (hidden, channels),
        )
    )
    products = registers * units.scheduled / (units.count * CORES[generation])
    return ceil(products) + matmul_floor(generation, case.shape, case.heads // case.shards).scheduled


def build_block(
    case: BlockCase, implementation: str = "kernel", kernel_repo: str | None = None
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A block with weights of no meaning on the `tpu` device, and the inputs of one call, batch 1.

    Stock, its text has no padding and no mask, as a single prompt's has. Patched, its text is padded, and
    its modulation looked up.
    implementation: of the kernels, as in `patch_transformer`.
    """
    with torch.device("meta"):
        transformer: Any = QwenImageTransformer2DModel(num_layers=1, num_attention_heads=case.heads)
        _keep_one_shard(transformer, case.shards)
    # diffusers' own `to` warns about modules to be kept in float32 even where there are none.
    torch.nn.Module.to(transformer.to_empty(device="cpu"), case.dtype).requires_grad_(False).eval()
    transformer.pos_embed = QwenImageTransformer2DModel(num_layers=0, num_attention_heads=1).pos_embed
    block = transformer.transformer_blocks[0]
    for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
        torch.nn.init.ones_(getattr(block.attn, name).weight)
    if case.patched:
        kernels = load_kernels(kernel_repo).module
        kernels.patch_transformer(transformer, implementation=implementation)
        ModulationTable(transformer).fill([torch.zeros(())])
    transformer.to("tpu")
    return block, _inputs(transformer, case)


def _keep_one_shard(transformer: Any, shards: int) -> None:
    """Leave of each linear layer in diffusers' plan for tensor parallelism what one chip has of it."""
    block = transformer.transformer_blocks[0]
    for pattern, split in transformer._tp_plan.items():
        name = pattern.removeprefix("transformer_blocks.*.")
        linear: Any = block.get_submodule(name)
        inputs, outputs = linear.in_features, linear.out_features
        sizes = (inputs, outputs // shards) if split == "colwise" else (inputs // shards, outputs)
        block.set_submodule(name, torch.nn.Linear(*sizes))


def capture_block(case: BlockCase, kernel_repo: str | None = None) -> Program:
    """The program of one call of the block; the emulated device must be started."""
    block, inputs = build_block(case, kernel_repo=kernel_repo)
    return capture(block, **inputs)


def _inputs(transformer: Any, case: BlockCase) -> dict[str, Any]:
    """What the transformer gives its blocks, zeros but for the rotary tables."""
    channels, shape = case.heads * HEAD_DIM, case.shape

    def zeros(*size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=case.dtype, device="tpu")

    grid = [[(1, shape.image_tokens // IMAGE_ROW, IMAGE_ROW)]]
    image_rope, text_rope = transformer.pos_embed(
        grid, max_txt_seq_len=shape.text_tokens, device=torch.device("tpu")
    )
    arguments: dict[str, Any] = {
        "hidden_states": zeros(1, shape.image_tokens, channels),
        "encoder_hidden_states": zeros(1, shape.text_tokens, channels),
        "encoder_hidden_states_mask": None,
        "temb": torch.zeros(1, dtype=torch.int64, device="tpu") if case.patched else zeros(1, channels),
        "image_rotary_emb": (image_rope, text_rope),
    }
    if case.patched:
        lengths = torch.full((1,), shape.text_tokens, dtype=torch.int32, device="tpu")
        arguments["joint_attention_kwargs"] = {"text_lengths": lengths, "text_rotary_emb": text_rope}
    return arguments


def report(case: BlockCase, generation: str, console: Console) -> None:
    """Print cycles and memory of the stock and of the patched block, and where their cycles go.

    The kernels make their choices for the environment's generation (`take_generation`).
    """
    cases = [replace(case, patched=patched) for patched in (False, True)]
    with console.status("capturing both blocks from torch-tpu"):
        programs = {case: capture_block(case) for case in cases}
    compiled: dict[BlockCase, CompiledProgram] = {}
    for case, program in programs.items():
        with console.status(f"compiling the block, {case.name}, for {generation}"):
            compiled[case] = compile_program(program, TOPOLOGIES[generation])
    _print(generation, compiled, console)


def _print(generation: str, compiled: dict[BlockCase, CompiledProgram], console: Console) -> None:
    (stock, first), (_, second) = compiled.items()
    shard = f" on one of {stock.shards} chips" if stock.shards > 1 else ""
    console.print(
        f"[bold]{generation}[/], one block{shard}, {stock.heads} heads, {stock.shape} tokens: stock"
        f" {first.schedule.cycles:,} cycles, ours {second.schedule.cycles:,}"
        f" ({first.schedule.cycles / second.schedule.cycles:.2f} times fewer); the matrix products alone take"
        f" {block_floor(generation, stock):,}"
    )
    for case, program in compiled.items():
        console.print(_table(generation, case, program))


def _table(generation: str, case: BlockCase, program: CompiledProgram) -> Table:
    """The kernels with a share of the cycles worth a row, the others together, and the whole block."""
    memory, schedule = program.memory, program.schedule
    table = Table(
        title=f"{case.name}: weights and inputs {memory.arguments / GIB:.2f} GiB, temporaries"
        f" {memory.temporaries / GIB:.2f} GiB"
    )
    table.add_column("fusion or kernel", overflow="fold")
    for column in ("calls", "cycles", "share", "HBM MiB", "as cycles"):
        table.add_column(column, justify="right")
    bytes_per_cycle = HBM_BYTES_PER_SECOND[generation] / CLOCK_HZ[generation]

    def add(name: str, calls: str, cycles: int, moved: int) -> None:
        share, as_cycles = f"{cycles / schedule.cycles:.1%}", f"{moved / bytes_per_cycle:,.0f}"
        table.add_row(name, calls, f"{cycles:,}", share, f"{moved / MIB:.1f}", as_cycles)

    others, others_moved = schedule.cycles, schedule.traffic.total
    for kernel in sorted(schedule.kernels, key=lambda kernel: -kernel.calls * kernel.cycles):
        cycles, moved = kernel.calls * kernel.cycles, kernel.calls * kernel.traffic.total
        if cycles >= SMALLEST_SHARE * schedule.cycles:
            add(kernel.name, str(kernel.calls), cycles, moved)
            others, others_moved = others - cycles, others_moved - moved
    add("all others, copies between them", "", others, others_moved)
    table.add_section()
    add("all", "", schedule.cycles, schedule.traffic.total)
    return table
