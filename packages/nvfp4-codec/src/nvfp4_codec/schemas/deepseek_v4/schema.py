"""A whole checkpoint: every tensor of a configuration, with dtype and shape in each layout."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from ...errors import CheckpointError
from .config import Block, ModelConfig
from .names import TEMPLATES, Scheme, Template, module_of, parse
from .report import Report, match_names
from .table import Format, Role

#: How a matrix is stored: in its official format, decompressed, or as modelopt's NVFP4.
Layout = Literal["official", "plain", "nvfp4"]

_PLAIN_DTYPES: dict[Format, str] = {
    "fp8_block": "BF16", "mxfp4": "BF16", "bf16": "BF16", "fp32": "F32", "int64": "I64",
}  # fmt: skip


class TensorSpec(NamedTuple):
    """One stored tensor: dtypes in safetensors' spelling, the shape as stored (packed)."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """One tensor of the model, before anyone decides how it is stored.

    ``shape`` is logical ([out, in] of a matrix); ``format`` is the official one.
    """

    template: Template
    block: Block | None
    indices: tuple[str, ...]
    format: Format
    shape: tuple[int, ...]

    @property
    def role(self) -> Role:
        """What the tensor is for."""
        return self.template.row.role

    @property
    def in_mtp(self) -> bool:
        """Whether the tensor belongs to an MTP block."""
        return self.template.in_mtp

    def name(self, scheme: Scheme = "official") -> str:
        """Its name in one scheme."""
        return self.template.name(scheme).replace("#", "%s") % self.indices

    def module(self, scheme: Scheme = "official") -> str:
        """The name without ``.weight``."""
        return module_of(self.name(scheme))


class Schema:
    """All tensors of one DeepSeek-V4 model."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    @cached_property
    def _blocks(self) -> dict[tuple[str, str], Block]:
        return {(block.kind, str(block.index)): block for block in self.config.blocks}

    def templates(self) -> Iterator[Template]:
        """The templates that can occur: DSpark's or plain MTP's, not both."""
        unused = "mtp" if self.config.dspark else "dspark"
        return (template for template in TEMPLATES if template.group != unused)

    def entries(self) -> Iterator[Entry]:
        """Every tensor of the model, template by template; no optional ones."""
        for template in self.templates():
            if template.row.optional:
                continue
            for block in self._blocks_with(template):
                shape = self._shape(template, block)
                format_ = self.official_format(template)
                prefix = () if block is None else (str(block.index),)
                for indices in self._expert_indices(template, prefix):
                    yield Entry(template, block, indices, format_, shape)

    def find(self, name: str, scheme: Scheme = "official") -> Entry | None:
        """The tensor that ``name`` belongs to (itself, a companion or its module), or None."""
        parsed = parse(name, scheme)
        if parsed is None or parsed.template is None:
            return None
        template = self.own_template(parsed.template)
        if template is None or not self.has(template, parsed.indices):
            return None
        return self.entry_at(template, parsed.indices)

    def tensors(
        self,
        layout: Layout | Callable[[Entry], Layout] = "official",
        scheme: Scheme = "official",
    ) -> Iterator[TensorSpec]:
        """Every stored tensor with dtype and shape, each matrix stored in ``layout``."""
        for entry in self.entries():
            yield from self.stored(
                entry, layout if isinstance(layout, str) else layout(entry), scheme
            )

    def stored(
        self, entry: Entry, layout: Layout = "official", scheme: Scheme = "official"
    ) -> Iterator[TensorSpec]:
        """The tensors that one entry is stored as: itself and its scales.

        Layouts change matrices only; what is no matrix, or official BF16 under "official", is one
        tensor. Raises CheckpointError where NVFP4 does not divide the matrix.
        """
        module, shape = entry.module(scheme), entry.shape
        compressed = entry.format in ("fp8_block", "mxfp4")
        if (
            not entry.template.row.linear
            or layout == "plain"
            or (layout == "official" and not compressed)
        ):
            yield TensorSpec(entry.name(scheme), _PLAIN_DTYPES[entry.format], shape)
            return
        rows, columns = shape
        if layout == "nvfp4":
            if columns % 16:
                raise CheckpointError(
                    f"{columns} columns are no multiple of NVFP4's block of 16",
                    tensor=entry.name(scheme),
                )
            yield TensorSpec(f"{module}.weight", "U8", (rows, columns // 2))
            yield TensorSpec(f"{module}.weight_scale", "F8_E4M3", (rows, columns // 16))
            yield TensorSpec(f"{module}.weight_scale_2", "F32", ())
            yield TensorSpec(f"{module}.input_scale", "F32", ())
        elif entry.format == "mxfp4":
            yield TensorSpec(f"{module}.weight", "I8", (rows, columns // 2))
            yield TensorSpec(f"{module}.scale", "F8_E8M0", (rows, columns // 32))
        else:
            tall, wide = self.config.fp8_block
            scales = (-(-rows // tall), -(-columns // wide))
            yield TensorSpec(f"{module}.weight", "F8_E4M3", shape)
            yield TensorSpec(f"{module}.scale", self.config.scale_dtype, scales)

    def match(
        self,
        names: Collection[str],
        scheme: Scheme | None = None,
        layout: Layout | Callable[[Entry], Layout] | None = None,
    ) -> Report:
        """Hold the tensor names of a checkpoint against the model.

        ``scheme`` None detects it. ``layout`` None infers it, template by template, from the
        companions that are there: if one ``layers.#.attn.wq_a`` has a ``weight_scale``, all must.
        Give a function where layers of one kind are stored differently on purpose. NVFP4's
        ``input_scale`` is asked of all tensors of a template if one has it (weight-only exports
        have none).

        Raises:
            CheckpointError: no scheme, or two (see `detect_scheme`).
        """
        return match_names(self, names, scheme, layout)

    def entry_at(self, template: Template, indices: tuple[str, ...]) -> Entry:
        """The entry of a template at indices that the model has."""
        block = self._block_of(template, indices)
        shape = self._shape(template, block)
        return Entry(template, block, indices, self.official_format(template), shape)

    def own_template(self, template: Template) -> Template | None:
        """The template of this model with that official name: plain MTP and DSpark share most."""
        return self._by_official.get(template.official)

    @cached_property
    def _by_official(self) -> dict[str, Template]:
        return {template.official: template for template in self.templates()}

    def _blocks_with(self, template: Template) -> Iterator[Block | None]:
        if template.group == "root":
            yield None
            return
        kind = "layers" if template.group == "layers" else "mtp"
        for block in self.config.blocks:
            if block.kind == kind and _applies(template, block):
                yield block

    def _block_of(self, template: Template, indices: tuple[str, ...]) -> Block | None:
        if template.group == "root":
            return None
        return self._blocks.get(("layers" if template.group == "layers" else "mtp", indices[0]))

    def has(self, template: Template, indices: tuple[str, ...]) -> bool:
        """Whether the model has the template's tensor at these indices."""
        if template.group == "root":
            return True
        block = self._block_of(template, indices)
        if block is None or not _applies(template, block):
            return False
        return len(indices) < 2 or int(indices[1]) < self.config.num_experts

    def all_indices(self, template: Template) -> Iterator[tuple[str, ...]]:
        """The indices at which the model has the template's tensor."""
        for block in self._blocks_with(template):
            yield from self._expert_indices(template, () if block is None else (str(block.index),))

    def _expert_indices(
        self, template: Template, prefix: tuple[str, ...]
    ) -> Iterator[tuple[str, ...]]:
        if template.official.count("#") < 2:
            yield prefix
            return
        for expert in range(self.config.num_experts):
            yield (*prefix, str(expert))

    def official_format(self, template: Template) -> Format:
        """The format in which the official checkpoint of this model stores a tensor."""
        if template.row.role == "routed_expert":
            return self.config.expert_format
        return template.row.format

    def _shape(self, template: Template, block: Block | None) -> tuple[int, ...]:
        # 75,000 experts have three shapes
        key = template, block.ratio if block else 0
        if (known := self._shapes.get(key)) is None:
            known = self._shapes[key] = self._computed_shape(template, block)
        return known

    @cached_property
    def _shapes(self) -> dict[tuple[Template, int], tuple[int, ...]]:
        return {}

    def _computed_shape(self, template: Template, block: Block | None) -> tuple[int, ...]:
        dims = dict(self.config.dimensions)
        # One row of the mixing matrix for reading and one for writing, besides streams x streams.
        dims["mix"] = dims["streams"] * (dims["streams"] + 2)
        dims["ratio"] = block.ratio if block else 0
        dims["overlap"] = 2 if block and block.ratio == 4 else 1
        return tuple(_evaluate(expression, dims) for expression in template.row.shape)


def _applies(template: Template, block: Block) -> bool:
    match template.row.when:
        case "compressed":
            return block.ratio > 0
        case "indexed":
            return block.ratio == 4
        case "hashed":
            return block.hashed
        case "scored":
            return not block.hashed
        case "first":
            return block.first
        case "last":
            return block.last
        case "always":
            return True


def _evaluate(expression: str, dims: dict[str, int]) -> int:
    """A sum of products and exact quotients of dimension names and numbers."""
    total = 0
    for term in expression.split("+"):
        product, *divisors = term.split("/")
        value = 1
        for factor in product.split("*"):
            value *= dims[factor] if factor in dims else int(factor)
        for divisor in divisors:
            value, rest = divmod(value, dims[divisor])
            if rest:
                raise CheckpointError(f"{term} is not a whole number", file="config.json")
        total += value
    return total
