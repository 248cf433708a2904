"""What users do with the published kernels; each runs in a process of its own (test_kernels_tools.py).

python hub_programs.py <function> <arguments>
"""

# Each imports what it needs, as kernels and huggingface_hub read their variables when imported, and some
# run where packages are missing.
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

REPO = "org/qwenimage-tpu-kernels"


def literal() -> None:
    from kernels import get_kernel

    print(get_kernel(REPO, version=1, trust_remote_code=[REPO]).__name__)


def run_functions(backend: str | None = None) -> None:
    """Two functions against their references."""
    import torch
    from kernels import get_kernel

    kernels: Any = get_kernel(REPO, version=1, backend=backend, trust_remote_code=[REPO])
    x, weight = torch.randn(1, 8, 128), torch.randn(128)
    streams = [torch.randn(1, 24, 128) for _ in range(6)]
    for function, inputs in ((kernels.rms_norm, (x, weight)), (kernels.joint_attention, streams)):
        torch.testing.assert_close(function(*inputs), function(*inputs, implementation="reference"))
    print(kernels.__name__, "torch_tpu" if "torch_tpu" in sys.modules else "without torch_tpu")


def verified(repo: str) -> None:
    from qwenimage_tpu.kernel_loader import load_kernels

    print(load_kernels(repo, trust_remote_code=True).build_id)


def load_kernel() -> None:
    import kernels

    print(kernels.load_kernel(REPO, lockfile=Path("kernels.lock")).__name__)


def get_locked_kernel(*trust: str) -> None:
    import kernels

    allowed = list(trust) or False
    print(kernels.get_locked_kernel(REPO, lockfile=Path("kernels.lock"), trust_remote_code=allowed).__name__)


def emulated() -> None:
    from qwenimage_tpu import emulator, environment

    environment.configure()
    emulator.start()
    import torch

    from qwenimage_tpu.kernel_loader import load_kernels

    kernels: Any = load_kernels(REPO, trust_remote_code=True).module
    x, weight = torch.randn(1, 8, 128), torch.randn(128)
    on_tpu = kernels.rms_norm(x.to("tpu"), weight.to("tpu"), implementation="interpret")
    assert on_tpu.device.type == "tpu"
    torch.testing.assert_close(on_tpu.cpu(), kernels.rms_norm(x, weight))
    print(kernels.__name__)


def kernelize_layers() -> None:
    """Every layer in the place of diffusers' own, in the modes that `kernelize` knows."""
    import torch
    from diffusers.models.normalization import AdaLayerNormContinuous, RMSNorm
    from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformerBlock
    from kernels import LayerRepository, Mode, kernelize, replace_kernel_forward_from_hub, use_kernel_mapping

    originals = (RMSNorm, AdaLayerNormContinuous, QwenImageTransformerBlock)
    transformer = tiny_transformer()
    stock = forward(transformer)
    count = sum(isinstance(module, originals) for module in transformer.modules())
    mapping: dict[str, Any] = {}
    for original in originals:
        name = original.__name__
        replace_kernel_forward_from_hub(original, name)
        mapping[name] = {"cpu": LayerRepository(REPO, layer_name=name, version=1, trust_remote_code=[REPO])}
    with use_kernel_mapping(mapping, inherit_mapping=False):
        kernelize(transformer, mode=Mode.TRAINING, device="cpu")
        assert torch.equal(forward(transformer), stock)
        for mode in (Mode.INFERENCE, Mode.INFERENCE | Mode.TORCH_COMPILE):
            kernelize(transformer, mode=mode, device="cpu", use_fallback=False)
            assert replaced(transformer) == count
            torch.testing.assert_close(forward(transformer), stock, rtol=1e-4, atol=1e-4)
    print(f"{count} layers")


def kernelize_function() -> None:
    import torch
    from kernels import FuncRepository, Mode, kernelize, use_kernel_func_from_hub, use_kernel_mapping

    @use_kernel_func_from_hub("rms_norm")
    def rms_norm(
        x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6, implementation: str = "kernel"
    ) -> torch.Tensor:
        assert implementation == "kernel"
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rms_norm: Any = rms_norm

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rms_norm(x, torch.ones(128))

    model, x = Model(), torch.randn(1, 8, 128)
    plain = model(x)
    repository = FuncRepository(REPO, func_name="rms_norm", version=1, trust_remote_code=[REPO])
    with use_kernel_mapping({"rms_norm": {"cpu": repository}}, inherit_mapping=False):
        kernelize(model, mode=Mode.INFERENCE, device="cpu", use_fallback=False)
    assert replaced(model) == 1
    torch.testing.assert_close(model(x), plain)
    print("1 function")


def two_versions() -> None:
    """Versions 1 and 2 at once: eagerly, in one compiled function, and one after the other in a model."""
    import torch
    from kernels import get_kernel

    from qwenimage_tpu.kernel_loader import load_kernels

    first, second = (get_kernel(REPO, version=version, trust_remote_code=[REPO]) for version in (1, 2))
    assert load_kernels(REPO, trust_remote_code=True).module is first
    assert load_kernels(REPO, version=2, trust_remote_code=True).module is second
    assert (hasattr(first, "version_two"), hasattr(second, "version_two")) == (False, True)

    def both(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return first.rms_norm(x, weight) + 2 * second.rms_norm(x, weight)

    x, weight = torch.randn(1, 8, 128), torch.randn(128)
    expected = 3 * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight
    torch.testing.assert_close(both(x, weight), expected)
    torch.testing.assert_close(torch.compile(both, fullgraph=True)(x, weight), expected)

    stock = forward(tiny_transformer())
    models = [tiny_transformer() for _ in range(2)]
    for kernels, model in zip((first, second), models, strict=True):
        kernels.patch_transformer(model)
    for model in models:
        torch.testing.assert_close(forward(model), stock, rtol=1e-4, atol=1e-4)
        # The function above went through all of torch's compiler; this takes a tenth of the time.
        model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(forward(model), stock, rtol=1e-4, atol=1e-4)
    print("side by side")


def tiny_transformer() -> Any:
    from qwenimage_tpu.tiny import tiny_pipeline

    return tiny_pipeline().transformer


def forward(transformer: Any) -> "torch.Tensor":
    import torch

    generator = torch.Generator().manual_seed(0)
    image = torch.randn(1, 36, transformer.config.in_channels, generator=generator)
    text = torch.randn(1, 10, transformer.config.joint_attention_dim, generator=generator)
    mask, timestep = torch.ones(1, 10, dtype=torch.long), torch.tensor([0.5])
    with torch.no_grad():
        return transformer(image, text, mask, timestep, [[(1, 6, 6)]], return_dict=False)[0]


def replaced(model: Any) -> int:
    """How many modules have another forward than their class."""
    return sum("forward" in vars(module) for module in model.modules())


if __name__ == "__main__":
    name, *given = sys.argv[1:]
    globals()[name](*given)
