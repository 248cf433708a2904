"""The repository's card: CARD.md, filled from the build's API and the benchmark's results."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from huggingface_hub import CardData, RepoCard

from qwenimage_tpu.assemble import BuildConfig
from qwenimage_tpu.lab.attention_report import AttentionReport

from .public_api import Declaration

TEMPLATE = "CARD.md"
TAGS = ["kernel", "tpu", "pallas", "diffusers", "qwen-image"]


def fill_card(
    template: Path,
    repo: str,
    config: BuildConfig,
    api: Mapping[str, Declaration],
    reports: Sequence[AttentionReport],
    versions: Mapping[str, str],
) -> str:
    """The card's Markdown.

    Raises:
        ValueError: the template asks for a value that there is none of, or its metadata is not YAML.
    """
    functions = [
        (name, found.summary) for name, found in api.items() if found.kind == "function" and "." not in name
    ]
    layers = [
        (name.removeprefix("layers."), found.summary)
        for name, found in api.items()
        if found.kind == "class" and name.startswith("layers.")
    ]
    card = RepoCard.from_template(
        CardData(library_name="kernels", license=config.license.lower(), tags=TAGS),
        template_path=str(template),
        repo=repo,
        version=config.version,
        backends=config.backends,
        functions=functions,
        layers=layers,
        benchmark=benchmark_table(reports),
        remarks=benchmark_remarks(reports[0]),
        shape=shape_of(reports),
        generations=" ".join(f"-g {report.generation}" for report in reports),
        libtpu=versions["libtpu"],
        jax=versions["jax"],
    )
    return card.content


def benchmark_table(reports: Sequence[AttentionReport]) -> str:
    """A Markdown table: contenders by their cycles on the first generation, a column per generation."""
    header = ["cycles", *(report.generation for report in reports)]
    rows = [header, ["---", *("---:" for _ in reports)]]
    cycles = {
        (report.generation, result.contender): f"{result.measured.cycles:,}"
        for report in reports
        for result in report.results
        if result.measured is not None
    }
    for result in reports[0].ranked:
        name = f"**{result.contender}**" if result.ours else result.contender
        columns = [cycles.get((report.generation, result.contender), "") for report in reports]
        rows.append([name, *columns])
    rows.append(["*the matmuls alone*", *(f"{report.floor.scheduled:,}" for report in reports)])
    rows.append(["*at the published peak*", *(f"{report.floor.peak:,}" for report in reports)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def benchmark_remarks(report: AttentionReport) -> list[str]:
    """What the cycles of a contender do not say."""
    remarks: list[str] = []
    for result in report.ranked:
        if result.remark:
            remarks.append(f"{result.contender}: {result.remark}.")
        if result.measured and report.memory_seconds(result.measured) > report.cycle_seconds(result.measured):
            waits = f"{report.memory_seconds(result.measured) * 1e6:,.0f} µs on {report.generation}"
            remarks.append(f"{result.contender}: bound by memory, {waits}.")
    return remarks


def shape_of(reports: Sequence[AttentionReport]) -> str:
    """The call that was measured, in words."""
    first = reports[0]
    return f"{first.image_tokens} image and {first.text_tokens} text tokens, {first.heads} heads of 128, bf16"
