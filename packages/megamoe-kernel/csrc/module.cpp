// Python's view of the C++ that host and kernels share. Nothing of torch or CUDA is linked.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <bit>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "megamoe/layout/buffer.hpp"
#include "tilings.hpp"

namespace py = pybind11;

namespace megamoe {
namespace {

using Sizes = std::array<uint64_t, sizeof(BufferSizes) / sizeof(uint64_t)>;

const char* type_name(Type type) {
  switch (type) {
    case Type::kU8: return "U8";
    case Type::kE4M3: return "E4M3";
    case Type::kBF16: return "BF16";
    case Type::kF32: return "F32";
    case Type::kU32: return "U32";
    case Type::kI64: return "I64";
    case Type::kU64: return "U64";
  }
  return "";
}

const char* access_name(Access access) {
  switch (access) {
    case Access::kPeers: return "Peers";
    case Access::kHost: return "Host";
    case Access::kKernel: return "Kernel";
  }
  return "";
}

// (name, type, access, rows, columns, offset) of every field, then the sizes of the shared part
// and of the whole.
auto layout_of(const Sizes& numbers) {
  const BufferSizes sizes = std::bit_cast<BufferSizes>(numbers);
  const BufferTable table = buffer_table(sizes);
  const BufferLayout layout = buffer_layout(sizes);
  using Row = std::tuple<std::string, std::string, std::string, uint64_t, uint64_t, uint64_t>;
  std::vector<Row> rows;
  for (int i = 0; i < kNumFields; ++i) {
    const BufferRow& row = table.row[i];
    rows.emplace_back(row.name, type_name(row.type), access_name(row.access), row.rows,
                      row.columns, layout.offset[i]);
  }
  return std::tuple(rows, layout.shared_bytes, layout.bytes);
}

// Structs of integers as Python has them: tuples.
template <class Struct>
using Ints = std::array<int, sizeof(Struct) / sizeof(int)>;
template <class Struct>
Ints<Struct> ints(const Struct& value) {
  return std::bit_cast<Ints<Struct>>(value);
}

template <class Tiling, class Rows>
auto tilings_of(const Rows& rows) {
  std::vector<Ints<Tiling>> found;
  for (const ForTokens<Tiling>& row : rows) found.push_back(ints(row.tiling));
  return found;
}

// An architecture's tilings: all, those that a layer can take, the one for a number of tokens; and
// the constants of a kernel: of its tiling, of its shape, threads of a CTA.
template <class Tiling, class Format>
void define_tilings(py::module_& module, const std::string& arch,
                    std::span<const ForTokens<Tiling>> all) {
  const auto define = [&](const char* name, auto function) {
    module.def((arch + name).c_str(), function, py::call_guard<py::gil_scoped_release>());
  };
  define("_tilings", [=] { return tilings_of<Tiling>(all); });
  define("_fitting", [=](const Ints<MoEShape>& layer) {
    return tilings_of<Tiling>(fitting(all, std::bit_cast<MoEShape>(layer)));
  });
  define("_tiling_for", [=](const Ints<MoEShape>& numbers, int64_t tokens) {
    const MoEShape layer = std::bit_cast<MoEShape>(numbers);
    return ints(chosen(fitting(all, layer), layer, tokens));
  });
  define("_constants", [](const Ints<Tiling>& numbers, const Ints<MoEShape>& layer, int num_ranks,
                          int num_shared, int ring_rows) {
    const Tiling tiling = std::bit_cast<Tiling>(numbers);
    require(tiling.ctas == 1 || tiling.ctas == 2, "a cluster has one CTA or two");
    const Problem problem =
        problem_of<Format>(std::bit_cast<MoEShape>(layer), num_ranks, num_shared, ring_rows,
                           tiling.block_rows, tiling.weight_rows(), Tiling::kCtasInTurns);
    require(fits(tiling, std::bit_cast<MoEShape>(layer)), "the tiling does not divide the layer");
    return std::tuple(constants_of(tiling, problem), ints(problem), tiling.threads());
  });
}

constexpr int kScalarCtas = 132;  // that take turns: one on each multiprocessor of an H200

// The same of the scalar kernel, which has one tiling.
Ints<Problem> scalar_constants(const Ints<MoEShape>& numbers, int num_ranks, int ring_rows,
                               bool is_nvfp4, int block_rows, int weight_rows) {
  const MoEShape layer = std::bit_cast<MoEShape>(numbers);
  const auto problem = is_nvfp4 ? &problem_of<Nvfp4> : &problem_of<Bf16>;
  return ints(problem(layer, num_ranks, 0, ring_rows, block_rows, weight_rows,
                      kScalarCtas));
}

}  // namespace
}  // namespace megamoe

PYBIND11_MODULE(_native, module, py::mod_gil_not_used()) {
  using namespace megamoe;
  module.doc() = "What megamoe_kernel shares with its kernels, and which of them suits a call.";
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  module.def("buffer_layout", &layout_of, unlocked);
  define_tilings<Sm90Choice, Bf16>(module, "sm90", kSm90Tilings);
  define_tilings<Sm100Choice, Nvfp4>(module, "sm100", kSm100Tilings);
  module.def("sm100_pairs", [] { return tilings_of<Sm100Choice>(kSm100Pairs); }, unlocked);
  module.def("scalar_constants", &scalar_constants, unlocked);
}
