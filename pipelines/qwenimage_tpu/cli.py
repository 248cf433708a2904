"""The command `qwenimage-tpu`. Heavy imports happen inside the commands, so that --help is instant."""

import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Literal, NoReturn, cast

import typer

from . import environment
from .options import RuleTableName, SoftmaxName

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
SECONDS_FOR_ANOTHER = 2
# RuntimeErrors of ours that say what the user can do; named, so that none need be imported.
USER_ERRORS = (
    "KernelLoadError",
    "EmulatorError",
    "CompilerKilledError",
    "ProcessFailedError",
    "PublishError",
)

# Set while a generate command is checked and not run.
_only_check = ContextVar("_only_check", default=False)

app = typer.Typer(
    name="qwenimage-tpu",
    help="QwenImage on Cloud TPU through Pallas kernels from the Kernels Hub.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

KernelRepo = Annotated[
    str | None,
    typer.Option(
        help="Load the kernels from this folder or Hub repository, owner/name or owner/name@revision, instead"
        " of the bundled build."
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run a --kernel-repo of a publisher whom the Hub does not list as trusted.",
    ),
]


@app.command("generate")
def generate_command(
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT...", help="What to paint; one or more.")],
    model: Annotated[
        str | None, typer.Option(help="A local folder or a Hub id, for example Qwen/Qwen-Image.")
    ] = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="Use a tiny built-in model that knows coloured shapes.")
    ] = False,
    negative_prompt: Annotated[
        str | None, typer.Option(help="What to avoid; a single space if not given.")
    ] = None,
    true_cfg_scale: Annotated[
        float | None,
        typer.Option(
            help="Strength of classifier-free guidance; 1 turns it off and halves the time; 4, with --demo 3."
        ),
    ] = None,
    height: Annotated[int | None, typer.Option(help="In pixels; 1024, with --demo 96.")] = None,
    width: Annotated[int | None, typer.Option(help="In pixels; 1024, with --demo 96.")] = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps; 50, with --demo 16.")] = None,
    seed: Annotated[int, typer.Option(help="Of the first picture; each further one adds 1.")] = 0,
    batch: Annotated[int, typer.Option(help="Pictures per prompt.")] = 1,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="A .png file; several pictures are numbered or go to a folder."),
    ] = Path("qwenimage.png"),
    dtype: Annotated[
        Literal["bfloat16", "float32"] | None, typer.Option(help="bfloat16, with --demo float32.")
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "tpu"], typer.Option(help="auto takes the TPU if there is one.")
    ] = "auto",
    text_encoder_device: Annotated[
        Literal["cpu", "tpu"],
        typer.Option(help="Where texts are encoded; cpu saves the TPU's memory. launch splits it over TPUs."),
    ] = "cpu",
    engine: Annotated[
        Literal["torch", "jax"],
        typer.Option(help="What denoises: diffusers, or one JAX program on a mesh of chips."),
    ] = "torch",
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="DATA,MODEL",
            help="As in 2,4: devices for the branches or pictures, and for each one's model. With --engine"
            " jax they are virtual on a CPU; otherwise `launch` starts a process for each.",
        ),
    ] = None,
    compilation: Annotated[
        Literal["auto", "blocks", "full", "none"],
        typer.Option(
            "--compile",
            help="What torch compiles: the repeated block, the whole transformer or nothing; auto is blocks"
            " on a TPU and none on a CPU.",
        ),
    ] = "auto",
    compile_cache: Annotated[
        Path | None, typer.Option(help="Keep compiled programs in this folder for later runs.")
    ] = None,
    kernel_repo: KernelRepo = None,
    trust_remote_code: TrustRemoteCode = False,
    softmax: Annotated[
        SoftmaxName | None,
        typer.Option(
            help="Of the attention kernel. Left out, the fastest that is exact for the model; int8 rounds"
            " queries and keys."
        ),
    ] = None,
    no_kernels: Annotated[bool, typer.Option("--no-kernels", help="Run stock diffusers.")] = False,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Run the same seeds also without kernels and print the difference."),
    ] = False,
    contact_sheet: Annotated[
        bool,
        typer.Option(
            "--contact-sheet", help="Write all pictures into one PNG, in a grid, with their prompts."
        ),
    ] = False,
) -> None:
    """Make pictures from prompts."""
    environment.configure()
    with _readable_errors():
        # JAX compiles its program whatever is asked for.
        mode = _compile_mode("none" if engine == "jax" and compilation == "auto" else compilation, device)
        if compile_cache is not None:
            if mode is None and engine == "torch":
                raise ValueError("--compile-cache keeps what is compiled, but nothing is; leave it out")
            environment.use_compile_cache(compile_cache)
        from .options import DEMO_SIZE, DEMO_STEPS, DEMO_TRUE_CFG_SCALE, GenerateOptions, parse_mesh
        from .request import Request

        size, default_steps, default_scale, default_dtype = (
            (DEMO_SIZE, DEMO_STEPS, DEMO_TRUE_CFG_SCALE, "float32") if demo else (1024, 50, 4.0, "bfloat16")
        )
        options = GenerateOptions(
            prompts=tuple(prompts),
            negative_prompt=negative_prompt,
            true_cfg_scale=default_scale if true_cfg_scale is None else true_cfg_scale,
            height=size if height is None else height,
            width=size if width is None else width,
            steps=default_steps if steps is None else steps,
            seed=seed,
            images_per_prompt=batch,
            kernels=not no_kernels,
            kernel_repo=kernel_repo,
            trust_remote_code=trust_remote_code,
            softmax=softmax,
            compile=mode,
        )
        request = Request(
            options=options,
            model=model,
            demo=demo,
            dtype=dtype or default_dtype,
            device=environment.choose_device(device),
            text_encoder_device=text_encoder_device,
            engine=engine,
            mesh=None if mesh is None else parse_mesh(mesh),
            output=output,
            compare=compare,
            contact_sheet=contact_sheet,
        )
        if _only_check.get():
            return
        if request.mesh is not None and request.engine == "jax" and request.device == "cpu":
            environment.use_virtual_devices(math.prod(request.mesh))
        # The user's mistakes are known by now, so that they do not wait for torch.
        started = time.perf_counter()
        with _status("loading torch and diffusers"):
            from .generate_command import run

        run(request, import_seconds=time.perf_counter() - started)


def _compile_mode(compilation: str, device: str) -> Literal["blocks", "full"] | None:
    if compilation == "auto":
        return "blocks" if environment.choose_device(device) == "tpu" else None
    return None if compilation == "none" else cast(Literal["blocks", "full"], compilation)


@app.command("launch", context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def launch_command(
    arguments: Annotated[
        list[str], typer.Argument(metavar="generate ...", help="A generate command with all its options.")
    ],
    processes: Annotated[
        int, typer.Option("--nproc", min=1, help="How many: one per TPU chip, or any number on a CPU.")
    ],
) -> None:
    """Run generate in several processes that share the transformer: launch --nproc 8 generate --mesh 2,4 ...

    Without --mesh, two groups if there are branches or pictures for two. If one process fails, all end.
    """
    environment.configure()
    with _readable_errors():
        if arguments[0] != "generate":
            raise ValueError(f"only generate can be launched, but the command is {arguments[0]!r}")
        if environment.is_launched():
            raise ValueError("this process was launched by another launcher; call one of the two")
        _check_generate(arguments[1:], processes)
        with _status("loading torch"):
            from .parallel.launch import launch

        launch(processes, arguments)


def _check_generate(arguments: list[str], processes: int) -> None:
    """Find mistakes in the options of a generate command before any process is started."""
    command = typer.main.get_group(app).commands["generate"]
    os.environ["WORLD_SIZE"] = str(processes)
    checked = _only_check.set(True)
    try:
        command.invoke(command.make_context("launch ... generate", arguments))
    finally:
        _only_check.reset(checked)
        del os.environ["WORLD_SIZE"]


@app.command("doctor")
def doctor_command(
    model: Annotated[
        Path | None, typer.Option(help="Also say which softmax this local checkpoint gets.")
    ] = None,
    kernel_repo: KernelRepo = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Check versions, clashes, hardware and kernels, and say what to do about each problem."""
    # The checks judge what the user set, not what we set for ourselves.
    user_environment = dict(os.environ)
    environment.configure()
    with _readable_errors():
        from .doctor import diagnose, has_problem, print_json, print_table

        checks = diagnose(user_environment, model, kernel_repo, trust_remote_code=trust_remote_code)
        (print_json if as_json else print_table)(checks)
        if has_problem(checks):
            raise typer.Exit(1)


@app.command("build")
def build_command(
    check: Annotated[
        bool, typer.Option("--check", help="Only name the files that are out of date; exit 1 if any.")
    ] = False,
) -> None:
    """Assemble the Kernels Hub build in build/ from the sources of this clone."""
    with _readable_errors():
        from .assemble import assemble, stale_files

        root = Path(__file__).resolve().parents[2]
        if not check:
            for variant in assemble(root, root / "build"):
                typer.echo(variant.relative_to(root))
        elif stale := stale_files(root):
            _print_error("\n".join(f"build/{path} is stale" for path in stale))
            _print_error("run `make build` and commit build/")
            raise typer.Exit(1)


@app.command("publish")
def publish_command(
    repo: Annotated[
        str, typer.Option(help="The kernel repository on the Hub, owner/name; it is created if need be.")
    ] = "org/qwenimage-tpu-kernels",
    token: Annotated[
        str | None, typer.Option(help="Of the Hub, with write access; as `hf auth login` left it.")
    ] = None,
    upload: Annotated[bool, typer.Option("--upload", help="Do it; without, only say what would be.")] = False,
) -> None:
    """Publish the kernels of this clone on the Hub, as the version that build.toml says.

    Checks that all is committed, the build fresh, the benchmark of these kernels, and that a published
    version keeps its API. Uploads build/, the card and the benchmark in one commit to branch v<version>, then
    loads that in a fresh process and cache. Doing it again changes nothing.
    """
    environment.configure()
    with _readable_errors():
        from rich.console import Console

        with _status("loading"):
            from .publishing.command import publish

        root = Path(__file__).resolve().parents[2]
        publish(root, repo, token, upload=upload, console=Console())


@app.command("tune")
def tune_command(
    generations: Annotated[
        list[str] | None,
        typer.Option(
            "--for", "--generation", "-g", help="v5e, v5p, v6e or tpu7x; repeat it for several; all."
        ),
    ] = None,
    results: Annotated[
        Path, typer.Option(metavar="FILE", help="What was measured; a later run goes on from there.")
    ] = Path("tune-attention.jsonl"),
) -> None:
    """Search the attention kernel's block sizes by executed cycles, and write its table. In a clone only.

    Takes hours for all generations, and can be interrupted. Afterwards run `qwenimage-tpu build`.
    """
    environment.configure()
    with _readable_errors():
        from rich.console import Console

        from .request import check_report_path

        check_report_path(results)
        from .lab.tune import TABLE, TOPOLOGIES, run

        root = Path(__file__).resolve().parents[2]
        run(generations or list(TOPOLOGIES), results, root / TABLE, Console(stderr=True))


@app.command("check-tpu")
def check_tpu_command() -> None:
    """Compile every kernel ahead of time, at QwenImage's shapes, for every TPU generation."""
    environment.configure()
    with _readable_errors():
        from .lab.compile_check import report

        if not report():
            raise typer.Exit(1)


bench = typer.Typer(help="What the TPU's compiler makes of the kernels; needs no TPU.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@bench.command("block")
def bench_block_command(
    generation: Annotated[str, typer.Option("--for", help="v5e, v5p, v6e or tpu7x.")] = "v6e",
    heads: Annotated[int, typer.Option(help="Attention heads; the model's are 24.")] = 24,
    tensor_parallel: Annotated[
        int, typer.Option(help="Chips that share heads and MLP; one's part is compiled, without the sums.")
    ] = 1,
    image_tokens: Annotated[int, typer.Option(help="4096 for 1024 x 1024 pixels.")] = 4096,
    text_tokens: Annotated[int, typer.Option(help="The text bucket.")] = 512,
) -> None:
    """One transformer block as torch-tpu compiles it, stock and on our kernels: cycles, HBM bytes, memory."""
    environment.configure()
    with _readable_errors():
        from rich.console import Console

        from . import emulator
        from .lab.bench_block import BlockCase, check_block, report

        shape = check_block(heads, tensor_parallel, image_tokens, text_tokens, generation)
        environment.take_generation(generation)
        emulator.start()
        report(BlockCase(shape, heads, tensor_parallel), generation, Console())


@bench.command("fused")
def bench_fused_command(
    generations: Annotated[
        list[str] | None, typer.Option("--for", help="v5e, v5p, v6e or tpu7x; repeat it for several; v6e.")
    ] = None,
    image_tokens: Annotated[int, typer.Option(help="4096 for 1024 x 1024 pixels.")] = 4096,
    text_tokens: Annotated[int, typer.Option(help="The text bucket.")] = 512,
) -> None:
    """Each fused kernel beside XLA's own fusion of plain code, at the block's shapes: cycles, HBM bytes."""
    environment.configure()
    with _readable_errors():
        from rich.console import Console

        from qwenimage_tpu_pallas.shapes import JointShape

        from .lab.bench_fused import report

        report(JointShape(image_tokens, text_tokens), generations or ["v6e"], Console(width=120))


@bench.command("attention")
def bench_attention_command(
    generations: Annotated[
        list[str] | None,
        typer.Option(
            "--for", "--generation", "-g", help="v5e, v5p, v6e or tpu7x; repeat it for several; v6e."
        ),
    ] = None,
    heads: Annotated[
        int, typer.Option(help="Attention heads on the chip; 24 without tensor parallelism.")
    ] = 6,
    image_tokens: Annotated[int, typer.Option(help="4096 for 1024 x 1024 pixels.")] = 4096,
    text_tokens: Annotated[int, typer.Option(help="The text bucket.")] = 512,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write everything that was found.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the cycles as bars, a .png or .svg file.")
    ] = None,
) -> None:
    """The attention kernel beside others', compiled for a TPU: cycles, use of the units, memory.

    The others: jax's flash and splash attention and tokamax's splash attention, each with the best of the
    block sizes (queries/keys/keys of one step) 1536/1536/1536, 1536/1536/512, 2304/2304/768, 1024/1024/1024,
    1024/1024/512 and 1792/1792/896; torch-tpu's scaled_dot_product_attention; and plain XLA. Concatenations,
    transposes and padding around a kernel count. Takes minutes. On a TPU the JAX ones are timed, too.
    """
    environment.configure()
    with _readable_errors():
        from rich.console import Console

        _check_report_files(json_file, picture)
        from .lab.bench_attention import check_cases, run

        cases = check_cases(heads, image_tokens, text_tokens, generations or ["v6e"])
        run(cases, Console(width=120), json_file=json_file, picture=picture)


@bench.command("calls")
def bench_calls_command() -> None:
    """What the pipeline compiles and transfers, stock diffusers beside ours, on the emulated device."""
    environment.configure()
    with _readable_errors():
        from rich.console import Console

        from .lab.bench_calls import report

        report(Console(width=120))


@app.command("plan")
def plan_command(
    topology: Annotated[str, typer.Option(help="A slice, as in v6e:2x4, v5e:4x4, v5p:2x2x1, tpu7x:2x2x1.")],
    meshes: Annotated[
        list[str] | None,
        typer.Option("--mesh", help="DATA,MODEL devices, as in 2,4; repeat it for several; all that divide."),
    ] = None,
    height: Annotated[int, typer.Option(help="In pixels.")] = 1024,
    width: Annotated[int, typer.Option(help="In pixels.")] = 1024,
    text_tokens: Annotated[int, typer.Option(help="The text bucket: 128, 256, 512 or 1024.")] = 512,
    steps: Annotated[int, typer.Option(help="Denoising steps.")] = 50,
    cfg: Annotated[bool, typer.Option(help="True CFG: two forwards per step.")] = True,
    batches: Annotated[
        list[int] | None,
        typer.Option("--batch", help="Images that are made at once, 1 by default; repeat it for several."),
    ] = None,
    table: Annotated[
        RuleTableName,
        typer.Option("--placement", help="Of the weights: ours, diffusers' plan, or the PyTorch/XLA port's."),
    ] = "sharded",
    softmax: Annotated[SoftmaxName, typer.Option(help="Of the attention kernel.")] = "bounded",
    price: Annotated[
        float | None, typer.Option(metavar="DOLLARS", help="Per chip and hour; Google's list price of 2026.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write everything that was found.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw where the time goes, a .png or .svg file.")
    ] = None,
) -> None:
    """Does QwenImage fit a slice of TPUs, how long does an image take, at what price: without the slice.

    Compiles all 60 layers and all steps for the slice, for every mesh of it: minutes. Times are predictions.
    """
    environment.configure()
    with _readable_errors():
        from rich.console import Console

        from .options import parse_mesh

        _check_report_files(json_file, picture)
        chosen = [parse_mesh(mesh) for mesh in meshes] if meshes else None
        from .plan.command import check_cases, run
        from .plan.program import PlanCase

        template = PlanCase(
            topology=topology,
            data=1,
            model=1,
            image_tokens=0,
            text_tokens=text_tokens,
            images=1,
            guided=cfg,
            steps=steps,
            table=table,
            softmax=softmax,
        )
        cases = check_cases(topology, chosen, (height, width), template, batches or (1,))
        run(cases, price, Console(width=120), json_file=json_file, picture=picture)


@app.command("verify")
def verify_command(
    emulated: Annotated[
        bool, typer.Option("--emulated", help="Run on the emulated device of a machine without a TPU.")
    ] = False,
    output: Annotated[Path, typer.Option("--output", "-o", help="Gets the report, as Markdown.")] = Path(
        "qwenimage-tpu-report.md"
    ),
    kernel_repo: KernelRepo = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Check kernels, pictures, compilations and speed on this machine's TPU, and write a report."""
    environment.configure()
    with _readable_errors():
        from .request import check_report_path
        from .verify import verify

        check_report_path(output)
        if not verify(
            output, emulated=emulated, kernel_repo=kernel_repo, trust_remote_code=trust_remote_code
        ):
            raise typer.Exit(1)


def _check_report_files(json_file: Path | None, picture: Path | None) -> None:
    from .request import check_report_path

    for path in filter(None, (json_file, picture)):
        check_report_path(path)
    if json_file is not None and json_file == picture:
        raise ValueError(f"the numbers and the picture need a file each, but both are {picture}")


@contextmanager
def _readable_errors() -> Generator[None]:
    """Turn the user's mistakes into one red message without a traceback, and Ctrl-C into exit code 130.

    In a launched process the launcher gets the message, and prints that of the first to fail.
    """
    try:
        yield
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        _end_interrupted()
    except Exception as error:
        if environment.was_interrupted():  # and what was going on made another error of it
            _end_interrupted()
        if environment.is_launched():
            _report_to_launcher(error)
        elif _is_users(error):
            _print_error(str(error))
        else:
            raise
        raise typer.Exit(EXIT_USER_ERROR) from None


def _end_interrupted() -> NoReturn:
    if environment.is_launched():
        os._exit(EXIT_INTERRUPTED)  # without torch's warnings of what it was in the middle of
    _print_error("interrupted")
    raise typer.Exit(EXIT_INTERRUPTED) from None


def _is_users(error: Exception) -> bool:
    """Whether the message alone helps."""
    kinds = (ValueError, NotImplementedError, FloatingPointError, OSError)
    return isinstance(error, kinds) or type(error).__name__ in USER_ERRORS


def _report_to_launcher(error: Exception) -> None:
    from .parallel.launch import report_failure

    if not _is_users(error):
        # It may follow from another process's end, which then speaks first, and has this one ended.
        time.sleep(SECONDS_FOR_ANOTHER)
    report_failure(str(error) if _is_users(error) else "".join(traceback.format_exception(error)))


@contextmanager
def _status(message: str) -> Generator[None]:
    from rich.console import Console

    with Console(stderr=True).status(message):
        yield


def _print_error(message: str) -> None:
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True).print(Text(message, style="red"), soft_wrap=True)


def main() -> None:
    """The console script's entry point."""
    if environment.is_launched():
        # It has nothing to clean up, and must end in the middle of a collective, or of anything.
        environment.end_with_parent()
    else:
        # So that a terminated command, too, ends its processes and removes its temporary files.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, environment.interrupt)
    app()


if __name__ == "__main__":
    main()
