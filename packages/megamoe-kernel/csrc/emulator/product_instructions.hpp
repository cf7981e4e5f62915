// ptx/sm100.hpp for a host: what the tensor cores do, for one CTA or for a pair.
#pragma once

#include "emulator/product.hpp"
#include "emulator/tensor_instructions.hpp"

namespace megamoe::emulator {

using Ctas = std::vector<CtaState*>;

// Where byte `at` of a row lies: of scales 16 bytes a row, of operands 128, swizzled.
inline uint32_t scales_address(const Operand& scales, int row) {
  return scales.address + static_cast<uint32_t>(row / 8) * scales.stride +
         static_cast<uint32_t>(row % 8 * 16);
}
inline uint32_t operand_address(const Operand& operand, int row, int at) {
  const uint32_t address = operand.address + static_cast<uint32_t>(row / 8) * operand.stride +
                           static_cast<uint32_t>(row % 8 * 128 + at);
  return operand.swizzle == 2 ? swizzled(address) : address;
}

inline const char* operand_error(const Operand& operand, bool is_scales) {
  if (operand.version != 1) return "has a descriptor of version 0";
  if (operand.base_offset) return "has a descriptor with a base offset";
  if (operand.swizzle != (is_scales ? 0 : 2)) return "has a descriptor with another swizzle";
  if (!is_scales && operand.address % 1024 >= 128) return "has an operand not aligned to 1024";
  return nullptr;
}

// An operand's 16 bytes, as an operation begins: held against the clocks, and whose copy they are
// kept for the next commit.
inline void require_operand(CtaState& cta, uint32_t address, const char* access, const Site& site) {
  Emulation& e = *emulation;
  require(cta.shared.read(address, 16, e.engine(), e.known_to_engine()), access, "a stage", site);
  const Shadow::Write copy = cta.shared.last_write(address);
  uint32_t& consumed = e.cta().consumed[copy.agent];
  consumed = std::max(consumed, copy.time);
}

// Whether an operation that is carried out finds its operand as its thread left it.
inline bool still_there(const Pending& self, SharedMemory& shared, uint32_t address) {
  if (shared.read(address, 16, self.by, self.known).conflict != Shadow::Conflict::kNone) {
    emulation->note(self, "reads what has been overwritten meanwhile");
    return false;
  }
  for (uint32_t at = 0; at < 16; at += 4) {
    Cell& cell = shared.cell(address + at);
    if (cell == Cell::kUnwritten || cell == Cell::kInFlight) {
      emulation->note(self, cell == Cell::kUnwritten ? "reads shared memory that nobody has written"
                                                     : "reads what is still being copied");
      return false;
    }
    if (cell == Cell::kWritten) cell = Cell::kRead;
  }
  return true;
}

// One row of an operand, decoded; its scale word is at a lane and column of `scales`. False if
// something was wrong.
inline bool decode_row(const Pending& self, CtaState& codes, const Operand& operand, int row,
                       const CtaState& scales, int lane, int column, bool is_ue8m0,
                       DecodedRow& out) {
  if (!scales.tensor.written(lane, column)) {
    emulation->note(self, "reads scales that nobody has copied");
    return false;
  }
  const uint32_t word = scales.tensor.get(lane, column);
  out.garbage = word == kPoison;
  for (int chunk = 0; chunk < 2; ++chunk) {
    const uint32_t address = operand_address(operand, row, 16 * chunk);
    if (!still_there(self, codes.shared, address)) return false;
    for (int at = 0; at < 16; ++at) {
      const uint32_t byte_address = address + static_cast<uint32_t>(at);
      if (codes.shared.cell(byte_address) == Cell::kGarbage) out.garbage = true;
      const int byte = *codes.shared.at(byte_address), k = 32 * chunk + 2 * at;
      const float scale = decode_scale(word, k / 16, is_ue8m0);
      out.value[k] = decode_e2m1(byte & 15) * scale;
      out.value[k + 1] = decode_e2m1(byte >> 4) * scale;
    }
  }
  return true;
}

// A product's operands: descriptors and columns hold in all CTAs of the group alike.
struct Product {
  Instruction instruction;
  Operand a, b;
  int d, a_scales, b_scales;  // columns
  bool accumulate;

  int a_rows(const Ctas& group) const { return instruction.rows / static_cast<int>(group.size()); }
  int b_rows(const Ctas& group) const {
    return instruction.columns / static_cast<int>(group.size());
  }
  int b_scale_columns() const { return (instruction.columns + 31) / 32; }
};

inline void carry_out(const Pending& self, const Ctas& group, const Product& product) {
  static std::vector<DecodedRow> a, b;  // one thread of the CPU carries out everything
  const bool is_ue8m0 = product.instruction.is_ue8m0;
  const int a_rows = product.a_rows(group), b_rows = product.b_rows(group);
  a.resize(static_cast<size_t>(a_rows));
  b.resize(static_cast<size_t>(product.instruction.columns));
  for (CtaState* cta : group) {
    for (int m = 0; m < a_rows; ++m) {
      if (!decode_row(self, *cta, product.a, m, *cta, m, product.a_scales + m / 32, is_ue8m0,
                      a[static_cast<size_t>(m)])) {
        return;
      }
    }
    for (int n = 0; n < product.instruction.columns; ++n) {
      CtaState& owner = *group[static_cast<size_t>(n / b_rows)];
      if (!decode_row(self, owner, product.b, n % b_rows, *cta, n % 32, product.b_scales + n / 32,
                      is_ue8m0, b[static_cast<size_t>(n)])) {
        return;
      }
    }
    for (int m = 0; m < a_rows; ++m) {
      for (int n = 0; n < product.instruction.columns; ++n) {
        const int column = product.d + n;
        if (product.accumulate && !cta->tensor.written(m, column)) {
          return emulation->note(self, "adds to sums that nobody has written");
        }
        const DecodedRow &x = a[static_cast<size_t>(m)], &y = b[static_cast<size_t>(n)];
        const uint32_t before = product.accumulate ? cta->tensor.get(m, column) : 0;
        const bool garbage = x.garbage || y.garbage || before == kPoison;
        const float sum = static_cast<float>(as_float(before) + (garbage ? 0.0 : dot(x, y)));
        cta->tensor.set(m, column, garbage ? kPoison : as_bits(sum));
      }
    }
  }
}

inline void check_operand(CtaState& cta, const Operand& operand, int rows, const Site& site) {
  if (const char* error = operand_error(operand, false)) emulation->stop(site, error);
  for (int row = 0; row < rows; ++row) {
    for (int chunk = 0; chunk < 2; ++chunk) {
      const uint32_t address = operand_address(operand, row, 16 * chunk);
      if (!cta.shared.has(address, 16)) emulation->stop(site, "multiplies beyond shared memory");
      require_operand(cta, address, "multiplies", site);
    }
  }
}

inline void check_product(const Ctas& group, const Product& product, const Site& site) {
  const int agent = emulation->engine(), columns = product.instruction.columns;
  const Clock known = emulation->known_to_engine();
  const auto read = [&](Shadow& shadow, size_t at, size_t bytes) {
    return shadow.read(at, bytes, agent, known, false);
  };
  const auto write = [&](Shadow& shadow, size_t at, size_t bytes) {
    return shadow.write(at, bytes, agent, known, false);
  };
  for (CtaState* cta : group) {
    TensorMemory& tensor = cta->tensor;
    check_operand(*cta, product.a, product.a_rows(group), site);
    check_operand(*cta, product.b, product.b_rows(group), site);
    const auto allocated = [&](int column, int count) {
      require_allocated(*cta, 0, 128, column, count, known, "multiplies with", site);
    };
    allocated(product.d, columns);
    allocated(product.a_scales, 4);
    allocated(product.b_scales, product.b_scale_columns());
    emulator::require(tensor.held(0, 128, product.a_scales, 4, read), "reads", "scales", site);
    emulator::require(tensor.held(0, 32, product.b_scales, product.b_scale_columns(), read),
                      "reads", "scales", site);
    emulator::require(tensor.held(0, 128, product.d, columns, write), "overwrites", "sums", site);
  }
}

// The group of what the running thread begins.
template <int kCtas>
Ctas group_that_begins(const Site& site) {
  require_same_group<kCtas>(site);
  if (kCtas == 2 && !emulation->leads()) emulation->stop(site, "begins what is its leader's");
  return emulation->group(emulation->is(Mutant::kOneCta) ? 1 : kCtas);
}

}  // namespace megamoe::emulator

namespace megamoe::ptx {

template <int kCtas>
inline void tensor_copy_scales(uint32_t to, uint64_t from, Site site) {
  emulation->step();
  const emulator::Geometry& geometry = emulation->geometry;
  emulator::Operand source(from);
  if (emulation->is(Mutant::kScaleChunkStays)) {
    const uint32_t in_stage = geometry.in_stage(source.address);
    const bool is_token = in_stage >= geometry.token_scales_at;
    source.address -= in_stage - (is_token ? geometry.token_scales_at : geometry.weight_scales_at);
  }
  if (const char* error = emulator::operand_error(source, true)) emulation->stop(site, error);
  const int column = static_cast<int>(to & 0xFFFF), agent = emulation->engine();
  const emulator::Clock known = emulation->known_to_engine();
  emulator::Ctas group = emulator::group_that_begins<kCtas>(site);
  if (emulation->is(Mutant::kScalesAlone)) group.resize(1);
  for (emulator::CtaState* cta : group) {
    if (to >> 16) emulation->stop(site, "begins at a lane");
    emulator::require_allocated(*cta, 0, 128, column, 4, known, "copies scales to", site);
    for (int row = 0; row < 32; ++row) {
      const uint32_t address = scales_address(source, row);
      if (!cta->shared.has(address, 16)) emulation->stop(site, "copies beyond shared memory");
      emulator::require_operand(*cta, address, "copies scales of", site);
    }
    emulator::require(cta->tensor.held(0, 128, column, 4,
                                       [&](emulator::Shadow& shadow, size_t at, size_t bytes) {
                                         return shadow.write(at, bytes, agent, known, false);
                                       }),
                      "overwrites", "scales", site);
  }
  const auto carry_out = [group, source, column](const emulator::Pending& self) {
    for (emulator::CtaState* cta : group) {
      for (int row = 0; row < 32; ++row) {
        const uint32_t address = scales_address(source, row);
        if (!still_there(self, cta->shared, address)) return;
        for (int word_idx = 0; word_idx < 4; ++word_idx) {
          const uint32_t at = address + static_cast<uint32_t>(4 * word_idx);
          uint32_t word;
          std::memcpy(&word, cta->shared.at(at), 4);
          if (emulation->is(Mutant::kScaleBytes)) word = __builtin_bswap32(word);
          if (cta->shared.cell(at) == emulator::Cell::kGarbage) word = emulator::kPoison;
          int row_of_scale = 32 * word_idx + row;
          if (emulation->is(Mutant::kScaleOrder)) row_of_scale = 4 * row + word_idx;
          const int quarters = emulation->is(Mutant::kScaleWarps) ? 1 : 4;
          for (int quarter = 0; quarter < quarters; ++quarter) {
            cta->tensor.set(32 * quarter + row_of_scale % 32, column + row_of_scale / 32, word);
          }
        }
      }
    }
  };
  const int self = emulation->thread().agent;
  emulation->cta().products.push_back({site, self, agent, known, carry_out});
}

template <int kCtas>
inline void mma_nvfp4(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, bool accumulate,
                      uint32_t a_scales, uint32_t b_scales, Site site) {
  emulation->step();
  if (emulation->is(Mutant::kScaleFormat)) instruction |= 1u << 23;
  if (emulation->is(Mutant::kUnpacked)) instruction |= 5u << 7;
  if (emulation->is(Mutant::kFewerColumns)) instruction -= 1u << 17;
  if (emulation->is(Mutant::kHalfRows)) instruction -= 4u << 24;
  if (emulation->is(Mutant::kScaleId)) instruction |= 1u << 29;
  if (emulation->is(Mutant::kScalesSwapped)) std::swap(a_scales, b_scales);
  if (emulation->is(Mutant::kScaleColumns)) a_scales += 4;
  if (emulation->is(Mutant::kWeightStep)) a &= ~uint64_t{7};
  if (emulation->is(Mutant::kTokenStep)) b &= ~uint64_t{7};
  if (emulation->is(Mutant::kOperandsSwapped)) std::swap(a, b);
  if (emulation->is(Mutant::kStride)) a -= uint64_t{32} << 32;
  if (emulation->is(Mutant::kVersion)) a &= ~(uint64_t{3} << 46);
  if (emulation->is(Mutant::kDescriptorSwizzle)) b &= ~(uint64_t{7} << 61);
  if (emulation->is(Mutant::kKeepSums)) accumulate = true;
  if (emulation->is(Mutant::kForgetSums)) accumulate = false;
  const uint32_t second = emulation->geometry.accumulator_columns;
  if (emulation->is(Mutant::kOneAccumulator) && d >= second) d -= second;

  const emulator::Ctas group = emulator::group_that_begins<kCtas>(site);
  const auto column = [](uint32_t address) { return static_cast<int>(address & 0xFFFF); };
  const emulator::Product product{
      emulator::Instruction(instruction, static_cast<int>(group.size())),
      emulator::Operand(a),
      emulator::Operand(b),
      column(d),
      column(a_scales),
      column(b_scales),
      accumulate};
  if (product.instruction.error) emulation->stop(site, product.instruction.error);
  if (d >> 16 || a_scales >> 16 || b_scales >> 16) emulation->stop(site, "begins at a lane");
  if (product.a_scales % 4 || product.b_scales % 4) {
    emulation->stop(site, "has scales in no fourth column");
  }
  check_product(group, product, site);
  const auto carry_out = [group, product](const emulator::Pending& self) {
    emulator::carry_out(self, group, product);
  };
  emulation->cta().products.push_back({site, emulation->thread().agent, emulation->engine(),
                                       emulation->known_to_engine(), carry_out, group, product.d,
                                       product.instruction.columns});
}

template <int kCtas>
inline void tensor_commit(uint32_t address, Site site) {
  emulation->step();
  using M = Mutant;
  emulator::Ctas group = emulator::group_that_begins<kCtas>(site);
  if (emulation->is(M::kCommitAlone)) group.resize(1);
  std::vector<emulator::Barrier*> barriers;
  for (emulator::CtaState* cta : group) barriers.push_back(&barrier_at(*cta, address, site));
  const emulator::Barrier& own = *barriers[0];
  if (is_of(own, M::kNone, M::kLoseFree, M::kLoseSumsFull, M::kNone)) return;
  const bool early = is_of(own, M::kNone, M::kEarlyFree, M::kEarlySums, M::kNone);
  const int agent = emulation->thread().agent;
  const emulator::Clock known =
      early ? emulation->world.clocks.publish(agent) : emulation->commit();
  const auto arrive = [barriers](const emulator::Pending& self) {
    for (emulator::Barrier* barrier : barriers) emulator::arrive(*barrier, self.known, 0);
  };
  const emulator::Pending commit{site, agent, emulation->engine(), known, arrive};
  if (early) return arrive(commit);
  emulation->cta().products.push_back(commit);
}

}  // namespace megamoe::ptx
