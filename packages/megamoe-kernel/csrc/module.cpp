// Python's view of the C++ that host and kernels share. Nothing of torch or CUDA is linked.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <bit>
#include <string>
#include <tuple>
#include <vector>

#include "megamoe/layout/buffer.hpp"

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

}  // namespace
}  // namespace megamoe

PYBIND11_MODULE(_native, module, py::mod_gil_not_used()) {
  module.doc() = "What megamoe_kernel shares with its kernels; buffer_layout.py is its front.";
  module.def("buffer_layout", &megamoe::layout_of, py::call_guard<py::gil_scoped_release>());
}
