"""What vLLM built, asked inside its workers, which import this file by name."""

from __future__ import annotations

from typing import Any


def built(model: Any) -> dict[str, Any]:
    """The model's class, and by module the quantization method with its kernel, if it names one.

    Experts on a kernel from elsewhere have no such method: their own class, and the kernel's name.
    """
    methods = {}
    for name, module in model.named_modules():
        if type(module).__name__ == "KernelExperts":
            methods[name] = f"KernelExperts {module.backend.name}"
        method = getattr(module, "quant_method", None)
        if method is None:
            continue
        backends = ("nvfp4_backend", "mxfp4_backend", "fp8_backend", "kernel")
        chosen = [getattr(method, key) for key in backends if hasattr(method, key)]
        kernels = [
            str(one.value) if hasattr(one, "value") else type(one).__name__
            for one in chosen
            if one is not None
        ]
        methods[name] = " ".join([type(method).__name__, *kernels])
    kind = type(model)
    return {"model": f"{kind.__module__}.{kind.__qualname__}", "methods": methods}
