"""What the user may choose, and in which format every linear therefore runs.

Options travel to every vLLM process as ``--additional-config '{"vllm_dsv4": {...}}'``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Literal, get_args

from nvfp4_codec.schemas.deepseek_v4 import Role, fused_with

from .errors import OptionError
from .stored import EXPERTS, Format, Stored

Dtype = Literal["stored", "nvfp4", "fp8", "bf16"]
WoADtype = Literal["fp8", "bf16"]

#: The key of vLLM's additional_config under which the options lie.
KEY: Final = "vllm_dsv4"

_FORMATS: Final[Mapping[str, Format]] = {"nvfp4": "nvfp4", "fp8": "fp8_block", "bf16": "bf16"}
#: Which option moves a role. Roles without one are stored as vLLM wants them, or BF16.
_OPTION_OF: Final[Mapping[Role, str]] = {
    "wq_a": "attn_dtype", "wkv": "attn_dtype", "wq_b": "attn_dtype", "wo_b": "attn_dtype",
    "wo_a": "wo_a_dtype", "shared_expert": "shared_dtype", "indexer_wq_b": "indexer_dtype",
}  # fmt: skip
#: Linears that vLLM builds unquantized or not, depending on the checkpoint.
_AS_STORED: Final[tuple[Role, ...]] = ("mtp_proj",)
#: How NVFP4 experts get their input_scale.
CALIBRATE: Final = (
    "Export the model again with a calibration of its activations: `dsv4-quantize calibrate`, then "
    "`dsv4-quantize export` of the official checkpoint."
)


@dataclass(frozen=True)
class Options:
    """What may be chosen when a checkpoint is served.

    wo_a_dtype: of attention's first output projection, which vLLM multiplies with a kernel of its
        own. attn_dtype: of wq_a, wkv, wq_b and wo_b; shared_dtype: of the shared experts;
        indexer_dtype: of the indexer's wq_b. "stored" keeps the checkpoint's.
    verify_load: compare every converted layer with the codec's reference after loading.
    moe_kernel: the name of a MoE backend to take over the routed experts; None is vLLM's own.

    Raises OptionError for a value that does not exist.
    """

    wo_a_dtype: WoADtype = "fp8"
    attn_dtype: Dtype = "stored"
    shared_dtype: Dtype = "stored"
    indexer_dtype: Dtype = "stored"
    verify_load: bool = False
    moe_kernel: str | None = None

    def __post_init__(self) -> None:
        for name, known in (
            ("wo_a_dtype", WoADtype),
            ("attn_dtype", Dtype),
            ("shared_dtype", Dtype),
            ("indexer_dtype", Dtype),
        ):
            value, choices = getattr(self, name), get_args(known)
            if value not in choices:
                raise OptionError(f"{name} is {value!r}; choose one of {', '.join(choices)}.")
        if not isinstance(self.verify_load, bool):
            raise OptionError(f"verify_load is {self.verify_load!r}; give true or false.")
        if self.moe_kernel is not None and not isinstance(self.moe_kernel, str):
            raise OptionError(f"moe_kernel is {self.moe_kernel!r}; give a backend's name.")

    @classmethod
    def from_mapping(cls, given: object) -> Options:
        """The options from ``additional_config["vllm_dsv4"]``; None means the defaults.

        Raises OptionError for a key that does not exist, naming it.
        """
        if given is None:
            return cls()
        if not isinstance(given, Mapping):
            raise OptionError(
                f"additional_config[{KEY!r}] is {type(given).__name__}; give a JSON object."
            )
        known = [field.name for field in fields(cls)]
        if unknown := [str(key) for key in given if key not in known]:
            raise OptionError(
                f"{', '.join(unknown)}: no such option; known are {', '.join(known)}."
            )
        return cls(**given)

    def to_mapping(self) -> dict[str, Any]:
        """The options that are not the defaults, as JSON can hold them."""
        return {
            field.name: value
            for field, value in zip(fields(self), asdict(self).values(), strict=True)
            if value != field.default
        }


def runtime_formats(stored: Stored, options: Options) -> dict[str, Format]:
    """In which format vLLM runs every linear of `Stored.formats`, by the same module names.

    Routed experts stay as stored, and nothing ever becomes MXFP4. Compressors, weights_proj,
    gates and heads are BF16, as vLLM builds them. What is fused runs in one format: BF16 where
    the stored ones differ (`disagreeing`), since no other holds both. NVFP4 cannot be made while
    loading, for want of activation scales, so it is only kept.

    Raises OptionError if an option asks for NVFP4 where it is not stored, or NVFP4 without an
    activation scale would have to run.
    """
    wanted = _chosen(stored, options)
    packed = [module for module, own in wanted.items() if own == "nvfp4"]
    if new := [module for module in packed if stored.formats[module] != "nvfp4"]:
        raise OptionError(
            f"{_options_of(stored, new)} asks for NVFP4, but {len(new)} linears are not stored so, "
            f"the first is {new[0]} ({stored.formats[new[0]]}): their activation scales would be "
            "missing. Leave it 'stored', or export the model again with these in NVFP4."
        )
    if lacking := _unscaled(stored, wanted):
        raise OptionError(
            f"{len(lacking)} NVFP4 linears have no input_scale, the first is {lacking[0]}: their "
            f"activations cannot be quantized. {fix_unscaled(stored, lacking)}"
        )
    return wanted


def unscaled(stored: Stored, options: Options) -> tuple[str, ...]:
    """Linears that would run as NVFP4 and have no ``input_scale``, by module name, experts first.

    `runtime_formats` refuses them, whatever config.json says; the doctor says so in advance.
    """
    return _unscaled(stored, _chosen(stored, options))


def fix_unscaled(stored: Stored, modules: Iterable[str]) -> str:
    """What helps against `unscaled` linears, in a sentence: an option, if one moves them."""
    modules = list(modules)
    experts = any(module.endswith(EXPERTS) for module in modules)
    movers = "" if experts else _options_of(stored, modules)
    return f"Set {movers} to 'fp8' or 'bf16'. Or: {CALIBRATE}" if movers else CALIBRATE


def _unscaled(stored: Stored, chosen: Mapping[str, Format]) -> tuple[str, ...]:
    lacking = (m for m, own in chosen.items() if own == "nvfp4" and m in stored.weight_only)
    return tuple(sorted(lacking, key=lambda module: not module.endswith(EXPERTS)))


def _chosen(stored: Stored, options: Options) -> dict[str, Format]:
    wanted = {module: _wanted(stored, module, options) for module in stored.formats}
    wanted.update(dict.fromkeys(disagreeing(stored, options), "bf16"))
    return wanted


def disagreeing(stored: Stored, options: Options) -> tuple[str, ...]:
    """Linears that would run in another format than one that they are fused with."""
    wanted = {module: _wanted(stored, module, options) for module in stored.formats}
    return tuple(
        module
        for module, own in wanted.items()
        if any(wanted.get(other, own) != own for other in fused_with(module))
    )


def _wanted(stored: Stored, module: str, options: Options) -> Format:
    own = stored.formats[module]
    if module.endswith(EXPERTS):
        return own
    entry = stored.schema.find(module)
    assert entry is not None  # formats has the model's linears only
    if entry.role in _AS_STORED:
        return own
    option = _OPTION_OF.get(entry.role)
    if option is None:
        return "bf16"
    choice = getattr(options, option)
    if choice == "stored" or (choice == "nvfp4" and entry.in_mtp):
        # No calibration reaches MTP blocks: NVFP4 is asked for where it can be.
        return own
    return _FORMATS[choice]


def _options_of(stored: Stored, modules: Iterable[str]) -> str:
    entries = (stored.schema.find(module) for module in modules)
    names = {_OPTION_OF.get(entry.role) for entry in entries if entry is not None}
    return " and ".join(sorted(name for name in names if name))
