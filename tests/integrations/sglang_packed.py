"""A plugin of SGLang with experts in a format of its own: a quantisation method that eprt has no layout for."""

from __future__ import annotations


def register() -> None:
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    class PackedMoEMethod(UnquantizedFusedMoEMethod):  # type: ignore[misc]
        """Computes as SGLang's own does, so the tokens are known."""

    path = f"{UnquantizedFusedMoEMethod.__module__}.{UnquantizedFusedMoEMethod.__name__}"
    HookRegistry.register(path, PackedMoEMethod, HookType.REPLACE)
