// Matrix instructions: ldmatrix, stmatrix, mma of sm_80, wgmma of sm_90.
//
// Products of 16-bit numbers and tf32 are exact, and each result is one chain of fp32 sums over k. Hardware adds in
// another order with fewer bits, so results here are nearer to the exact ones.
#include <cstring>

#include "build.h"
#include "memory.h"

namespace ptx {
namespace {

// ---- tiles of 8 x 8 numbers of 16 bits, in registers: lane 4 r + c has columns 2 c and 2 c + 1 of row r ----
// a: addresses; lane 8 n + r has that of row r of tile n. d or b: one register per tile. flag: transposed.
void load_tiles(Context& c, const Instruction& i, u32) {
  std::vector<std::array<u32, kLanes>> out(i.count);
  for (u32 n = 0; n < i.count; ++n) {
    u16 tile[8][8];
    for (u32 row = 0; row < 8; ++row) {
      const u32 lane = 8 * n + row, address = static_cast<u32>(c.get(i.a[0], lane) + static_cast<u64>(i.offset));
      std::memcpy(tile[row], shared_at(c, i, lane, address, 16), 16);
      note_shared(c, i, lane, address, 16, Use::Read);
    }
    for (u32 lane = 0; lane < kLanes; ++lane) {
      const u32 x = lane / 4, y = 2 * (lane % 4);
      const u16 low = i.flag ? tile[y][x] : tile[x][y], high = i.flag ? tile[y + 1][x] : tile[x][y + 1];
      out[n][lane] = low | static_cast<u32>(high) << 16;
    }
  }
  for (u32 n = 0; n < i.count; ++n) std::memcpy(c.at<u32>(i.d[n].offset), out[n].data(), sizeof out[n]);
}

void store_tiles(Context& c, const Instruction& i, u32) {
  for (u32 n = 0; n < i.count; ++n) {
    u16 tile[8][8];
    for (u32 lane = 0; lane < kLanes; ++lane) {
      const u32 x = lane / 4, y = 2 * (lane % 4), value = c.at<u32>(i.b[n].offset)[lane];
      (i.flag ? tile[y][x] : tile[x][y]) = static_cast<u16>(value);
      (i.flag ? tile[y + 1][x] : tile[x][y + 1]) = static_cast<u16>(value >> 16);
    }
    for (u32 row = 0; row < 8; ++row) {
      const u32 lane = 8 * n + row, address = static_cast<u32>(c.get(i.a[0], lane) + static_cast<u64>(i.offset));
      u8* to = shared_at(c, i, lane, address, 16);
      note_shared(c, i, lane, address, 16, Use::Write, tile[row]);
      std::memcpy(to, tile[row], 16);
    }
  }
}

void build_tiles(Build& o) {
  const bool stores = o.words[0] == "stmatrix";
  if (!o.has("m8n8") || o.words.back() != "b16") o.refuse("tiles of another kind");
  Instruction& i = o.i;
  i.count = o.has("x4") ? 4 : o.has("x2") ? 2 : 1;
  i.flag = o.has("trans");
  i.a = o.address(stores ? 0 : 1, Space::Shared);
  (stores ? i.b : i.d) = o.registers(stores ? 1 : 0, 4);
  i.together = true;
  i.run = stores ? &store_tiles : &load_tiles;
}

// ---- mma: D [16, 8] = A [16, K] B [K, 8] + C ----
struct Half {
  using Sum = float;
  static constexpr int kPerRegister = 2;
  static float read(u32 x, int n) { return from_f16(static_cast<u16>(x >> 16 * n)); }
};
struct BFloat {
  using Sum = float;
  static constexpr int kPerRegister = 2;
  static float read(u32 x, int n) { return from_bf16(static_cast<u16>(x >> 16 * n)); }
};
struct Tf32 {
  using Sum = float;
  static constexpr int kPerRegister = 1;
  static float read(u32 x, int) { return read_tf32(x); }
};
struct Int8 {
  using Sum = s32;
  static constexpr int kPerRegister = 4;
  static s32 read(u32 x, int n) { return static_cast<s8>(x >> 8 * n); }
};

inline float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
inline s32 multiply_add(s32 a, s32 b, s32 c) { return static_cast<s32>(static_cast<u32>(a * b) + static_cast<u32>(c)); }
inline float result(float x) { return canonical(x); }
inline s32 result(s32 x) { return x; }

template <class Format, int K>
void multiply(Context& c, const Instruction& i, u32) {
  using Sum = typename Format::Sum;
  constexpr int kPer = Format::kPerRegister;
  constexpr int kStep = 4 * kPer;  // of k that one register of all lanes holds
  Sum a[16][K], b[K][8], sum[16][8];
  for (int step = 0; step < K / kStep; ++step) {
    const u32 *upper = c.at<u32>(i.a[2 * step].offset), *lower = c.at<u32>(i.a[2 * step + 1].offset), *right = c.at<u32>(i.b[step].offset);
    for (u32 lane = 0; lane < kLanes; ++lane)
      for (int n = 0; n < kPer; ++n) {
        const int k = step * kStep + static_cast<int>(lane % 4) * kPer + n;
        a[lane / 4][k] = Format::read(upper[lane], n);
        a[lane / 4 + 8][k] = Format::read(lower[lane], n);
        b[k][lane / 4] = Format::read(right[lane], n);
      }
  }
  for (u32 q = 0; q < 4; ++q)
    for (u32 lane = 0; lane < kLanes; ++lane)
      sum[lane / 4 + 8 * (q / 2)][2 * (lane % 4) + q % 2] = c.at<Sum>(i.c[q].offset)[lane];
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < K; ++k) {
      const Sum x = a[row][k];
#pragma omp simd
      for (int n = 0; n < 8; ++n) sum[row][n] = multiply_add(x, b[k][n], sum[row][n]);
    }
  for (u32 q = 0; q < 4; ++q)
    for (u32 lane = 0; lane < kLanes; ++lane)
      c.at<Sum>(i.d[q].offset)[lane] = result(sum[lane / 4 + 8 * (q / 2)][2 * (lane % 4) + q % 2]);
}

const std::unordered_map<std::string, Handler> kShapes = {
    {"m16n8k16.row.col.f32.f16.f16.f32", &multiply<Half, 16>},    {"m16n8k8.row.col.f32.f16.f16.f32", &multiply<Half, 8>},
    {"m16n8k16.row.col.f32.bf16.bf16.f32", &multiply<BFloat, 16>}, {"m16n8k8.row.col.f32.bf16.bf16.f32", &multiply<BFloat, 8>},
    {"m16n8k8.row.col.f32.tf32.tf32.f32", &multiply<Tf32, 8>},     {"m16n8k4.row.col.f32.tf32.tf32.f32", &multiply<Tf32, 4>},
    {"m16n8k32.row.col.s32.s8.s8.s32", &multiply<Int8, 32>},       {"m16n8k16.row.col.s32.s8.s8.s32", &multiply<Int8, 16>},
};

void build_mma(Build& o) {
  const size_t at = o.opcode.find(".m16");
  const auto found = at == std::string::npos ? kShapes.end() : kShapes.find(o.opcode.substr(at + 1));
  if (found == kShapes.end()) o.refuse("shape or types of mma");
  o.i.d = o.registers(0, 4);
  o.i.a = o.registers(1, 4);
  o.i.b = o.registers(2, 4);
  o.i.c = o.registers(3, 4);
  o.i.together = true;
  o.i.run = found->second;
}

// ---- wgmma: D [64, N] += A [64, 16] B [16, N], a warp has 16 rows ----
// d: D. a: A in registers, or its descriptor. b: the descriptor of B. c: whether to add. count: N. type: bf16, or fp16.
// mode: bit 0 if A, bit 1 if B is MN-major.

// The byte in shared memory of 8 numbers from (mn, k) on, along k of a K-major matrix and along mn of an MN-major one.
// An atom has 8 lines of 128, 64 or 32 bytes along that dimension; its 16-byte units change places by the bits of the
// address ("swizzle"). The stride leads from atom to atom of the other dimension. The leading one leads from atom to
// atom of mn if the matrix is MN-major; k of a K-major matrix stays within an atom.
u32 place(Context& c, const Instruction& i, u64 descriptor, u32 mn, u32 k, bool mn_major) {
  const u32 swizzle = static_cast<u32>(descriptor >> 62), line = 256u >> swizzle;  // 1: 128 bytes, 2: 64, 3: 32
  if (!swizzle || (descriptor >> 49 & 7)) c.stop("a descriptor of wgmma that is not supported", i);
  const u32 leading = 16 * static_cast<u32>(descriptor >> 16 & 0x3fff), stride = 16 * static_cast<u32>(descriptor >> 32 & 0x3fff);
  const u32 along = 2 * (mn_major ? mn : k), across = mn_major ? k : mn;
  u32 address = 16 * static_cast<u32>(descriptor & 0x3fff) + across / 8 * stride + across % 8 * line;
  address += mn_major ? along / line * leading + along % line : along;
  return address ^ (address >> 7 & (line / 16 - 1)) << 4;
}

// Reads 16 x `count` numbers of an operand in shared memory, from row or column `first` on, ordered by k.
void read_operand(Context& c, const Instruction& i, u64 descriptor, bool mn_major, u32 first, u32 count, float* out) {
  const u32 ks = mn_major ? 1 : 8, mns = mn_major ? 8 : 1;  // of 8 neighbours
  for (u32 k = 0; k < 16; k += ks)
    for (u32 mn = 0; mn < count; mn += mns) {
      const u32 address = place(c, i, descriptor, first + mn, k, mn_major);
      u16 x[8];
      std::memcpy(x, shared_at(c, i, 0, address, 16), 16);
      note_shared(c, i, 0, address, 16, Use::Read);
      for (u32 n = 0; n < 8; ++n)
        out[(mn_major ? k : k + n) * count + (mn_major ? mn + n : mn)] = i.type ? from_bf16(x[n]) : from_f16(x[n]);
    }
}

// Executes a product, or only looks at the memory that it will read.
void multiply(Context& c, const Product& p, bool compute) {
  const Instruction& i = *p.instruction;
  float a[16 * 16], b[16 * 256], sum[256];
  if (i.a.size() == 1) {
    read_operand(c, i, p.a, i.mode & 1, 16 * (c.warp.index % 4), 16, a);
  } else {
    for (u32 q = 0; q < 4; ++q)
      for (u32 lane = 0; lane < kLanes; ++lane)
        for (u32 n = 0; n < 2; ++n) {
          const u16 x = static_cast<u16>(p.registers[q][lane] >> 16 * n);
          a[(8 * (q / 2) + 2 * (lane % 4) + n) * 16 + lane / 4 + 8 * (q % 2)] = i.type ? from_bf16(x) : from_f16(x);
        }
  }
  read_operand(c, i, p.b, i.mode & 2, 0, i.count, b);
  if (!compute) return;
  for (u32 row = 0; row < 16; ++row) {
    const auto at = [&](u32 column) -> float& {
      return c.at<float>(i.d[4 * (column / 8) + 2 * (row / 8) + column % 2].offset)[row % 8 * 4 + column % 8 / 2];
    };
    for (u32 n = 0; n < i.count; ++n) sum[n] = p.accumulate ? at(n) : 0.0f;
    for (u32 k = 0; k < 16; ++k) {
      const float x = a[k * 16 + row];
#pragma omp simd
      for (u32 n = 0; n < i.count; ++n) sum[n] = std::fma(x, b[k * i.count + n], sum[n]);
    }
    for (u32 n = 0; n < i.count; ++n) at(n) = canonical(sum[n]);
  }
}

// A product happens at once or at the wait, as copies do, but never before an earlier one. Nothing may touch D until
// then: if something does, the two give different results.
void warpgroup_multiply(Context& c, const Instruction& i, u32) {
  Product p{&i, 0, c.get(i.b[0], 0), (c.get(i.c[0], 0) & 1) != 0, {}};
  if (i.a.size() == 1) p.a = c.get(i.a[0], 0);
  else
    for (u32 q = 0; q < 4; ++q) std::memcpy(p.registers[q].data(), c.at<u32>(i.a[q].offset), sizeof p.registers[q]);
  const u32 when = c.machine.settings.copies;
  if (when == 0 || (when == 2 && c.warp.products.idle() && c.machine.random() % 2)) return multiply(c, p, true);
  if (c.machine.settings.races) multiply(c, p, false);
  c.warp.products.groups.back().push_back(p);
}

void commit_products(Context& c, const Instruction&, u32) { c.warp.products.commit(); }

void wait_for_products(Context& c, const Instruction& i, u32) {
  std::vector<Product> group;
  while (c.warp.products.take(i.value, group))
    for (const Product& p : group) multiply(c, p, true);
}

void build_wgmma(Build& o) {
  Instruction& i = o.i;
  if (o.has("fence")) {  // orders registers, which are up to date here
    i.kind = Kind::Nothing;
    return;
  }
  i.together = true;
  if (o.has("commit_group")) {
    i.run = &commit_products;
    return;
  }
  if (o.has("wait_group")) {
    i.value = static_cast<u32>(o.number(0));
    i.run = &wait_for_products;
    return;
  }
  // wgmma.mma_async.sync.aligned.m64nNk16.f32.TYPE.TYPE d, a, b, add, sign of a, sign of b, whether a and b are MN-major
  const std::string& shape = o.words.at(4);
  const auto& last = o.words.back();
  if (!shape.starts_with("m64n") || !shape.ends_with("k16") || !o.has("f32") || (last != "bf16" && last != "f16"))
    o.refuse("shape or types of wgmma");
  i.count = static_cast<u32>(std::stoul(shape.substr(4)));
  i.type = last == "bf16";
  i.d = o.registers(0, 4);
  i.a = o.registers(1, o.operand(1).vector ? 4 : 8);
  i.b = o.registers(2, 8);
  i.c = o.registers(3, 1);
  if (i.d.size() != i.count / 2) o.refuse("number of results of wgmma");
  if (o.number(4) != 1 || o.number(5) != 1) o.refuse("negated operands of wgmma");
  for (size_t n = 6; n < o.operands.size(); ++n)
    if (o.number(n)) i.mode |= o.operands.size() == 8 ? 1 << (n - 6) : 2;  // with A in registers only B has one
  i.run = &warpgroup_multiply;
}

}  // namespace

void add_matrix(Builders& b) {
  b["ldmatrix"] = b["stmatrix"] = &build_tiles;
  b["mma"] = &build_mma;
  b["wgmma"] = &build_wgmma;
}

}  // namespace ptx
