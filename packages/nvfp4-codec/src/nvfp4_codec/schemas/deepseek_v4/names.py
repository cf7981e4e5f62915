"""Names in three schemes, and the translation between them.

``official``
    as DeepSeek ships and vLLM loads: ``layers.3.attn.wq_a.weight``
``hf``
    transformers' module names, as modelopt 0.45 with transformers 5.9 and 0.47 with 5.14 export
    them: ``model.layers.3.self_attn.q_a_proj.weight``
``half_converted``
    what modelopt exports with transformers 5.20 to 5.24: ``model.layers.3.attn.wq_a.weight``

Translation needs no config and keeps whatever follows the module name: ``weight`` and its
companions ``scale`` or ``weight_scale_inv`` (official block scales), ``weight_scale``,
``weight_scale_2``, ``input_scale`` (modelopt's NVFP4). It is one dictionary look-up on the name
with its indices cut out, so a name is either known exactly or refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

from ...errors import CheckpointError
from .table import BLOCK, CONTAINERS, DSPARK, MTP, ROOT, Row

Scheme = Literal["official", "hf", "half_converted"]
SCHEMES: tuple[Scheme, ...] = ("official", "hf", "half_converted")

#: What may stand next to a quantized matrix instead of, or besides, ``weight``.
COMPANIONS = ("scale", "weight_scale_inv", "weight_scale", "weight_scale_2", "input_scale")

# An index is a whole segment without leading zeros: "layers.07" is not a second name of layer 7.
_INDEX = re.compile(r"\.(0|[1-9][0-9]*)(?=\.|$)")
_ANY_INDEX = re.compile(r"(?<=\.)(0|[1-9][0-9]*)(?=\.|$)")


@dataclass(frozen=True, eq=False)
class Template:
    """A row of the table where it occurs: at the root, in a main layer or in an MTP block.

    ``official``, ``hf`` and ``half_converted`` are full names with ``#`` for each index;
    ``group`` is the table's part that the row stands in.
    """

    row: Row
    group: Literal["root", "layers", "mtp", "dspark"]
    official: str
    hf: str
    half_converted: str

    def name(self, scheme: Scheme) -> str:
        """The template in one scheme."""
        return str(getattr(self, scheme))

    @property
    def in_mtp(self) -> bool:
        """Whether the tensor belongs to an MTP block."""
        return self.official.startswith("mtp.")

    @property
    def parts(self) -> tuple[str, ...]:
        """What the tensor can be stored as: itself ("" or "weight") and its companions."""
        own = "weight" if self.official.endswith(".weight") else ""
        return (own, *COMPANIONS) if self.row.linear else (own,)


class Parsed(NamedTuple):
    """A name taken apart: which tensor, which of its parts, and the block and expert indices.

    ``part`` is None for the name of a module, "" for a tensor that is not called weight.
    """

    template: Template | None
    part: str | None
    indices: tuple[str, ...]


def _templates() -> Iterator[Template]:
    for row in ROOT:
        yield Template(row, "root", row.official, row.hf, row.half or row.official)
    for row in BLOCK:
        half = row.half or row.official
        prefixed = (
            "layers.#." + row.official,
            "model.layers.#." + row.hf,
            "model.layers.#." + half,
        )
        yield Template(row, "layers", *prefixed)
    for group, rows in (("mtp", (*BLOCK, *MTP)), ("dspark", (*BLOCK, *DSPARK))):
        for row in rows:
            if row.optional:
                continue
            # HF names never reach the MTP blocks, but the half-conversion does: attn.norm.
            official, half = f"mtp.#.{row.official}", f"mtp.#.{row.half or row.official}"
            yield Template(row, "mtp" if group == "mtp" else "dspark", official, official, half)


TEMPLATES: tuple[Template, ...] = tuple(_templates())


def module_of(tensor: str) -> str:
    """The module that a tensor named (or templated) so belongs to."""
    return tensor.removesuffix(".weight")


def _key(name: str) -> str:
    return name.replace(".#", "#")


class _Target(NamedTuple):
    template: Template | None
    part: str | None
    official: str  # a %-format with one %s for each index
    preferred: bool  # False: an accepted second spelling


def _spellings(template: Template, scheme: Scheme) -> Iterator[tuple[str, bool]]:
    row = template.row
    yield template.name(scheme), True
    also = {"official": None, "hf": row.hf_also, "half_converted": row.half_also}[scheme]
    if also is None or (template.in_mtp and scheme == "hf"):
        return
    prefix = {"root": "", "layers": "model.layers.#."}.get(template.group, "mtp.#.")
    yield prefix + also, False


def _join(block: str, tail: str) -> str:
    return f"{block}.{tail}" if tail else block


def _format(template: str) -> str:
    return template.replace("#", "%s")


def _lookup(scheme: Scheme) -> dict[str, _Target]:
    table: dict[str, _Target] = {}

    def add(name: str, target: _Target) -> None:
        known = table.setdefault(_key(name), target)
        if known.official != target.official or known.part != target.part:
            raise AssertionError(f"{scheme} name {name!r} would mean two things")

    for template in TEMPLATES:
        official = module_of(template.official)
        for name, preferred in _spellings(template, scheme):
            module = module_of(name)
            for part in template.parts:
                tail = f".{part}" if part else ""
                target = _Target(template, part, _format(official + tail), preferred)
                add(module + tail, target)
            if template.parts[0]:  # a tensor that is not a module's weight has no module here
                add(module, _Target(template, None, _format(official), preferred))
    layers = "layers.#" if scheme == "official" else "model.layers.#"
    for official, hf in CONTAINERS:
        for block, official_block, tail in (
            (layers, "layers.#", hf if scheme == "hf" else official),
            ("mtp.#", "mtp.#", official),
        ):
            translated = _format(_join(official_block, official))
            add(_join(block, tail), _Target(None, None, translated, True))
    return table


_LOOKUP: dict[Scheme, dict[str, _Target]] = {scheme: _lookup(scheme) for scheme in SCHEMES}
# The inverse: official key -> %-format in the scheme; preferred spellings only.
_INVERSE: dict[Scheme, dict[str, str]] = {
    scheme: {
        _key(target.official.replace("%s", "#")): _format(key.replace("#", ".#"))
        for key, target in table.items()
        if target.preferred
    }
    for scheme, table in _LOOKUP.items()
}


def parse(name: str, scheme: Scheme) -> Parsed | None:
    """Take a tensor's or module's name apart; None if the scheme has no such name."""
    pieces = _INDEX.split(name)
    target = _LOOKUP[scheme].get("#".join(pieces[::2]))
    if target is None:
        return None
    return Parsed(target.template, target.part, tuple(pieces[1::2]))


def to_official(name: str, scheme: Scheme) -> str:
    """Translate the name of a tensor or module into DeepSeek's.

    Raises:
        CheckpointError: the scheme has no such name.
    """
    pieces = _INDEX.split(name)
    target = _LOOKUP[scheme].get("#".join(pieces[::2]))
    if target is None:
        raise _unknown(name, scheme)
    return target.official % tuple(pieces[1::2])


def from_official(name: str, scheme: Scheme) -> str:
    """Translate DeepSeek's name of a tensor or module into ``scheme``.

    Raises:
        CheckpointError: there is no such official name, or the scheme has no module for it.
    """
    pieces = _INDEX.split(name)
    target = _INVERSE[scheme].get("#".join(pieces[::2]))
    if target is None:
        raise _unknown(name, "official")
    return target % tuple(pieces[1::2])


def fused_experts(name: str, num_experts: int) -> tuple[str, ...]:
    """The official names behind one of transformers' fused expert parameters, or nothing.

    In memory (never in an export) transformers stacks the experts of a layer into
    ``mlp.experts.gate_up_proj`` [E, 2 * inner, hidden], gate above up, and
    ``mlp.experts.down_proj`` [E, hidden, inner]. For the first, each expert gives w1, then w3.
    """
    found = re.fullmatch(r"model\.layers\.([0-9]+)\.mlp\.experts\.(gate_up|down)_proj", name)
    if found is None:
        return ()
    block = f"layers.{found[1]}.ffn.experts"
    leaves = ("w1", "w3") if found[2] == "gate_up" else ("w2",)
    return tuple(f"{block}.{e}.{leaf}.weight" for e in range(num_experts) for leaf in leaves)


#: Projections of one input that loaders concatenate: they then share one weight_scale_2.
FUSED = (("attn.wq_a", "attn.wkv"), ("compressor.wkv", "compressor.wgate"), ("w1", "w3"))


def fused_with(module: str) -> tuple[str, ...]:
    """The official names of the modules that loaders fuse into one matrix, this one among them.

    ``layers.3.ffn.experts.17.w3`` gives its ``w1`` and itself; a module that stands alone gives
    itself only.
    """
    for group in FUSED:
        for tail in group:
            if module.endswith(f".{tail}"):
                parent = module.removesuffix(tail)
                return tuple(parent + other for other in group)
    return (module,)


def detect_scheme(names: Iterable[str]) -> Scheme:
    """The scheme in which all recognizable ``names`` are written.

    Takes names of tensors and modules and the globs of quantization configs. Where several schemes
    fit (a shard with MTP tensors only, ``*.attn.*``) they agree on those names, and the first of
    official, hf, half_converted is returned. Unrecognized names are left to `Schema.match`.

    Raises:
        CheckpointError: nothing is recognized, or two names are of different schemes.
    """
    candidates = set(SCHEMES)
    witness = ""
    seen: dict[str, frozenset[Scheme]] = {}
    for name in names:
        shape = _INDEX.sub("#", name)
        if shape not in seen:
            seen[shape] = frozenset(s for s in SCHEMES if _written_in(name, shape, s))
            if not seen[shape]:
                continue
            if not candidates & seen[shape]:
                raise CheckpointError(
                    f"{witness!r} and {name!r} are names of different schemes "
                    f"({_list(candidates)}; {_list(seen[shape])}): mixed checkpoints are refused"
                )
            if not witness or candidates - seen[shape]:
                witness = name
            candidates &= seen[shape]
    if not witness:
        raise CheckpointError("no name is one of DeepSeek-V4's in any known scheme")
    return next(scheme for scheme in SCHEMES if scheme in candidates)


def _written_in(name: str, shape: str, scheme: Scheme) -> bool:
    if not is_glob(name):
        return shape in _LOOKUP[scheme]
    pattern = _ANY_INDEX.sub("0", name)
    return any(fnmatchcase(key.replace("#", ".0"), pattern) for key in _LOOKUP[scheme])


def is_glob(entry: str) -> bool:
    """Whether an entry of a quantization config has wildcards."""
    return any(character in entry for character in "*?[")


def _list(schemes: Iterable[Scheme]) -> str:
    return " or ".join(scheme for scheme in SCHEMES if scheme in set(schemes))


def _unknown(name: str, scheme: Scheme) -> CheckpointError:
    others = [s for s in SCHEMES if s != scheme and parse(name, s) is not None]
    hint = f"; it is one in {_list(others)}" if others else ""
    return CheckpointError(f"not a DeepSeek-V4 name in the {scheme} scheme{hint}", tensor=name)
