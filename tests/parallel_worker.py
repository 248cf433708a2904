"""One of several processes that paint together: python -m torch.distributed.run ... this CASES RESULTS.

CASES is a JSON list of {"model", "mesh", "options", "compiled", "split_text"}; the first process writes each
case's latents and pictures, in order, to RESULTS. compiled: if not 0, the transformer's blocks are
compiled into so many programs, and nothing is for another number of steps.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from qwenimage_tpu import environment
from qwenimage_tpu.options import GenerateOptions


def main(cases: Path, results: Path) -> None:
    import torch
    import torch.distributed as dist

    from qwenimage_tpu.compilation import enable_tpu_compile, watch_compilations
    from qwenimage_tpu.parallel import engine

    found: dict[str, Any] = {}
    for index, case in enumerate(json.loads(cases.read_text())):
        options = GenerateOptions(**case["options"] | {"prompts": tuple(case["options"]["prompts"])})
        model: str | None = case["model"]
        parallel = engine.load_parallel(
            model,
            model is None,
            torch.float32,
            "cpu",
            tuple(case["mesh"]),
            split_text=case["split_text"],
        )
        if case["compiled"]:
            enable_tpu_compile(parallel.pipe, "transformer", backend="aot_eager")
        with watch_compilations() as compilations:
            result = engine.generate(parallel, options)
        if case["compiled"]:
            with watch_compilations() as again:
                engine.generate(parallel, replace(options, steps=options.steps + 1))
            assert (compilations.programs, again.programs) == (case["compiled"], 0)
        if environment.is_leader():
            found[f"latents {index}"] = result.latents.numpy()
            found[f"pictures {index}"] = np.stack([np.asarray(image) for image in result.images])
        else:
            assert not result.images
    if environment.is_leader():
        np.savez(results, **found)
    dist.destroy_process_group()


if __name__ == "__main__":
    environment.configure()
    main(Path(sys.argv[1]), Path(sys.argv[2]))
