"""Entries of quantization configs: module names and globs such as ``model.layers.*.self_attn*``.

A glob cannot be rewritten word by word: HF's ``*gate_proj*`` covers the experts' w1 and the
compressors' wgate, and HF's ``compressor`` contains the indexer, which the official one does not.
So a glob is read as the set of modules that it matches in the given model; a rewritten glob is
accepted only if it matches exactly those, and otherwise the set is spelled out, with ``*`` for
indices where that is exact.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import translate
from functools import lru_cache
from typing import NamedTuple

from ...errors import CheckpointError
from .names import Scheme, detect_scheme, is_glob, module_of, parse, to_official
from .schema import Schema
from .table import BLOCK, CONTAINERS, ROOT


def translate_entry(entry: str, schema: Schema, scheme: Scheme) -> tuple[str, ...]:
    """Translate one entry of ``ignore`` or ``quantized_layers`` into official ones.

    A name gives one name; a glob gives one or more globs and names that match exactly the same
    quantizable modules of the model. (Norms count only for globs that match nothing else:
    ``layers.0.attn*`` stands for ``model.layers.0.self_attn*`` although it covers ``attn_norm``.)

    Raises:
        CheckpointError: the model has no such module, or the glob matches none.
    """
    if not is_glob(entry):
        if not _exists(entry, schema, scheme):
            raise CheckpointError(f"{entry!r} is no module of this model in the {scheme} scheme")
        return (to_official(entry, scheme),)
    reachable = _reachable(entry, schema, scheme)
    matches = _matcher(entry)
    for norms in (False, True):
        pool = [module for module in reachable if norms or module.quantizable]
        wanted = {module.official for module in pool if matches(module.name)}
        if not wanted:
            continue
        for candidate in _rewritten(entry, scheme):
            accepts = _matcher(candidate)
            if {module.official for module in pool if accepts(module.official)} == wanted:
                return (candidate,)
        everything = [m for m in _modules_of(schema, scheme) if norms or m.quantizable]
        return tuple(_spelled_out(wanted, everything))
    raise CheckpointError(f"{entry!r} matches no module of this model in the {scheme} scheme")


def translate_entries(
    entries: Iterable[str], schema: Schema, scheme: Scheme | None = None
) -> tuple[str, ...]:
    """Translate a whole list, without repetitions; ``scheme`` None detects it."""
    entries = tuple(entries)
    if scheme is None:
        scheme = detect_scheme(entries)
    return tuple(dict.fromkeys(o for e in entries for o in translate_entry(e, schema, scheme)))


def spell_out(modules: Iterable[str], schema: Schema) -> tuple[str, ...]:
    """Official names of quantizable modules as few entries that match exactly these.

    Globs stand for what is the same in all blocks, or for all experts of one.
    """
    pool = [module for module in _modules_of(schema, "official") if module.quantizable]
    return tuple(_spelled_out(set(modules), pool))


class _Module(NamedTuple):
    """A module that an entry can mean; ``shape`` is its official name with ``*`` for indices."""

    name: str
    official: str
    shape: str
    quantizable: bool


@lru_cache(maxsize=6)
def _modules(schema: Schema, scheme: Scheme) -> dict[str, list[_Module]]:
    """All modules of the model by their block's official name ("" at the root)."""
    blocks: dict[str, list[_Module]] = {}
    for entry in schema.entries():
        template = entry.template
        if not template.official.endswith(".weight"):
            continue
        block = "" if entry.block is None else f"{entry.block.kind}.{entry.block.index}"
        members = blocks.setdefault(block, [])
        name, official = entry.module(scheme), entry.module()
        shape = module_of(template.official).replace("#", "*")
        quantizable = template.row.linear or entry.role == "embed"
        members.append(_Module(name, official, shape, quantizable))
        if template.row.official == "ffn.experts.#.w1.weight" and entry.indices[1] == "0":
            # Fused MoE layers go by the name of the list, which holds no tensor of its own.
            of_list, official, shape = (path.rsplit(".", 2)[0] for path in (name, official, shape))
            members.append(_Module(of_list, official, shape, True))
    return blocks


def _exists(name: str, schema: Schema, scheme: Scheme) -> bool:
    parsed = parse(name, scheme)
    if parsed is None:
        return False
    if parsed.template is not None:
        return schema.find(name, scheme) is not None
    below = to_official(name, scheme) + "."
    modules = _reachable(below, schema, "official")
    return any(module.official.startswith(below) for module in modules)


def _reachable(entry: str, schema: Schema, scheme: Scheme) -> Sequence[_Module]:
    """The modules of the one block that an entry names before its first wildcard, or all.

    Exporters write hundreds of globs, one for each layer, against models of 75,000 modules.
    """
    literal = re.split(r"[*?[]", entry, maxsplit=1)[0]
    found = re.match(r"(?:model\.)?((?:layers|mtp)\.[0-9]+)\.", literal)
    if found is not None:
        return _modules(schema, scheme).get(found[1], ())
    return _modules_of(schema, scheme)


def _modules_of(schema: Schema, scheme: Scheme) -> list[_Module]:
    return [module for members in _modules(schema, scheme).values() for module in members]


def _matcher(pattern: str) -> Callable[[str], object]:
    return re.compile(translate(pattern)).match


def _rewritten(entry: str, scheme: Scheme) -> Iterator[str]:
    """Globs that may be the official form; the caller checks which one is."""
    yield entry
    bare = re.sub(r"^model\.(?=layers|\*)", "", entry)
    yield bare
    if scheme == "hf":
        yield _WORDS.sub(lambda found: _OFFICIAL_WORD[found[0]], bare)


def _words() -> dict[str, str]:
    """HF words that have one official meaning wherever they occur."""
    pairs: dict[str, set[str]] = {}
    for official, hf in [(row.official, row.hf.removeprefix("model.")) for row in BLOCK + ROOT] + [
        *CONTAINERS
    ]:
        ours, theirs = official.split("."), hf.split(".")
        if len(ours) == len(theirs):
            for word, other in zip(theirs, ours, strict=True):
                pairs.setdefault(word, set()).add(other)
    return {word: min(others) for word, others in pairs.items() if len(others) == 1 and word}


_OFFICIAL_WORD = _words()
_WORDS = re.compile(
    r"(?<![A-Za-z0-9_])(?:"
    + "|".join(sorted(map(re.escape, _OFFICIAL_WORD), key=len, reverse=True))
    + r")(?![A-Za-z0-9_])"
)


def _spelled_out(wanted: set[str], pool: Sequence[_Module]) -> Iterator[str]:
    """Kinds of module that are wanted everywhere, then in one block; names for what remains."""
    rest = set(wanted)
    for pattern_of in (_everywhere, _in_block, _by_name):
        kinds: dict[str, list[str]] = {}
        for module in pool:
            kinds.setdefault(pattern_of(module), []).append(module.official)
        for pattern, members in kinds.items():
            if rest.issuperset(members) and _stays_within(pattern, wanted, pool):
                rest.difference_update(members)
                yield pattern


def _everywhere(module: _Module) -> str:
    return module.shape


def _in_block(module: _Module) -> str:
    """The shape with the block's index filled in; an expert's index stays ``*``."""
    if not is_glob(module.shape):
        return module.shape
    return module.shape.replace("*", module.official.split(".", 2)[1], 1)


def _by_name(module: _Module) -> str:
    return module.official


def _stays_within(pattern: str, wanted: set[str], pool: Sequence[_Module]) -> bool:
    if not is_glob(pattern):
        return True
    accepts = _matcher(pattern)
    return all(module.official in wanted for module in pool if accepts(module.official))
