// Calls the CPU ops through their C ABI with random odd shapes, for every instruction set that this CPU has, and compares
// the results with plain loops in double precision. sanitize_cpu.py compiles it with the library's sources.
//
// Every array ends (sometimes begins) at a page that may not be touched, so a read or write beyond it ends the program,
// also one by an instruction that the sanitizers do not see. What lies between two rows of a weight is NaN.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cpu/ops.h"

extern "C" {
int medusa_decode_linear_cpu(const medusa::Linear*);
int medusa_decoder_layers_cpu(const medusa::Layers*);
int medusa_heads_topk_cpu(const medusa::Heads*);
int medusa_argmax_cpu(const medusa::Argmax*);
int medusa_gumbel_noise_cpu(const medusa::Noise*);
int medusa_tree_accept_cpu(const medusa::Accept*);
const char* medusa_cpu_isa(void);
int medusa_cpu_use(const char* name);
// Not there without a sanitizer.
void __attribute__((weak)) __sanitizer_set_death_callback(void (*callback)(void));
}

namespace {

using medusa::kBFloat16;
using medusa::kFloat32;
using medusa::kFloat8;
using medusa::kDynamicInt4;
using medusa::kDynamicInt8;
using medusa::kInt4;
using medusa::kInt8;
using medusa::kNf4;

std::mt19937 generator;
std::string where, what;  // the case that runs, for messages
bool failed = false;

int64_t any(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(generator); }
bool maybe() { return any(0, 1) == 1; }
double normal() { return std::normal_distribution<double>()(generator); }

void fail(const std::string& message) {
  if (!failed) std::printf("wrong: %s: %s: %s\n", where.c_str(), what.c_str(), message.c_str());
  failed = true;
}

void say_case() { std::fprintf(stderr, "this was %s: %s\n", where.c_str(), what.c_str()); }

int64_t size_of(int64_t type) { return type == kFloat32 ? 4 : type == kBFloat16 ? 2 : 1; }

// A weight's type beside activations of a type.
int64_t weight_type(int64_t activations) {
  const int64_t stored[] = {kInt8, kFloat8, kInt4, kNf4, medusa::kFp4};
  return maybe() ? activations : stored[any(0, 4)];
}

// What 4-bit codes and the bits of an e4m3 stand for, before zero points and scales.
double number_of(int64_t bits, int64_t type) {
  static const double fp4[] = {0, 0.0625, 8, 12, 4, 6, 2, 3};
  static const double nf4[] = {-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
                               -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
                               0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
                               0.7229568362236023, 1.0};
  if (type == kInt4 || type == kDynamicInt4) return static_cast<double>(bits);
  if (type == kNf4) return nf4[bits];
  if (type != kFloat8) return (bits < 8 ? 1 : -1) * fp4[bits % 8] / 12;
  const int exponent = static_cast<int>(bits >> 3 & 15);
  const double fraction = static_cast<double>(bits & 7) / 8;
  return (bits < 128 ? 1 : -1) * (exponent == 0 ? std::ldexp(fraction, -6) : std::ldexp(1 + fraction, exponent - 7));
}

double rounded(double value, int64_t type) {
  if (type == kInt8) return std::nearbyint(value);
  const float narrow = static_cast<float>(value);
  if (type == kFloat32) return narrow;
  uint32_t bits;
  std::memcpy(&bits, &narrow, 4);
  bits = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000;
  float back;
  std::memcpy(&back, &bits, 4);
  return back;
}

// Bytes between pages that may not be touched, all set, which is NaN in both floating types.
class Memory {
 public:
  explicit Memory(int64_t bytes) : bytes_(bytes) {
    const int64_t page = sysconf(_SC_PAGESIZE);
    inner_ = (bytes + page - 1) / page * page;
    all_ = inner_ + 2 * page;
    base_ = static_cast<char*>(mmap(nullptr, all_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (base_ == MAP_FAILED) std::abort();
    std::memset(base_, 0xff, all_);
    mprotect(base_, page, PROT_NONE);
    mprotect(base_ + page + inner_, page, PROT_NONE);
    first_ = base_ + page;
    data_ = any(0, 3) == 0 ? first_ : first_ + inner_ - bytes;
  }
  ~Memory() {
    for (char* at = first_; at < first_ + inner_; ++at) {
      if ((at < data_ || at >= data_ + bytes_) && *at != '\xff') fail("wrote outside of an array");
    }
    munmap(base_, all_);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  char* data() const { return data_; }

 private:
  int64_t bytes_, inner_, all_;
  char *base_, *first_, *data_;
};

// Numbers of one type, in memory and as doubles. `rows` of `columns` numbers, `stride` numbers apart.
class Array {
 public:
  Array(int64_t type, int64_t rows, int64_t columns, int64_t stride = 0)
      : type_(type),
        rows_(rows),
        columns_(columns),
        stride_(stride > 0 ? stride : columns),
        wide_(rows * columns),
        memory_(rows == 0 ? 0 : ((rows - 1) * stride_ + columns) * size_of(type) / (type >= kInt4 ? 2 : 1)) {}

  template <class Make>
  void fill(Make&& make) {
    for (int64_t row = 0; row < rows_; ++row) {
      for (int64_t column = 0; column < columns_; ++column) set(row, column, make());
    }
  }
  void set(int64_t row, int64_t column, double value) {
    if (type_ >= kFloat8 && type_ != kDynamicInt8) {  // the bits are given
      const auto bits = static_cast<int>(value);
      const int shift = type_ == kFloat8 || (column % 2 == 0) == (type_ == kInt4 || type_ == kDynamicInt4) ? 0 : 4;
      char* byte = at(row, column);
      *byte = static_cast<char>(type_ == kFloat8 ? bits : (*byte & ~(15 << shift)) | bits << shift);
      wide_[row * columns_ + column] = number_of(bits, type_);
      return;
    }
    value = wide_[row * columns_ + column] = rounded(value, type_);
    if (type_ == kInt8 || type_ == kDynamicInt8) {
      *at(row, column) = static_cast<char>(static_cast<int8_t>(value));  // a char may be unsigned
      return;
    }
    const float narrow = static_cast<float>(value);
    std::memcpy(at(row, column), reinterpret_cast<const char*>(&narrow) + 4 - size_of(type_), size_of(type_));
  }
  // What was set.
  double get(int64_t row, int64_t column) const { return wide_[row * columns_ + column]; }
  const double* row(int64_t row) const { return &wide_[row * columns_]; }
  // What memory holds now, row by row; not for int8.
  std::vector<double> read() const {
    std::vector<double> all;
    for (int64_t i = 0; i < rows_ * columns_; ++i) {
      float value = 0;
      std::memcpy(reinterpret_cast<char*>(&value) + 4 - size_of(type_), at(i / columns_, i % columns_), size_of(type_));
      all.push_back(value);
    }
    return all;
  }
  void* data() const { return memory_.data(); }
  int64_t rows() const { return rows_; }
  int64_t columns() const { return columns_; }
  int64_t stride_bytes() const { return stride_ * size_of(type_) / (type_ >= kInt4 ? 2 : 1); }

 private:
  char* at(int64_t row, int64_t column) const {
    return memory_.data() + (row * stride_ + column) * size_of(type_) / (type_ >= kInt4 ? 2 : 1);
  }
  int64_t type_, rows_, columns_, stride_;
  std::vector<double> wide_;
  Memory memory_;
};

// Integers, as they are.
template <class T>
class Integers {
 public:
  explicit Integers(const std::vector<T>& values) : memory_(values.size() * sizeof(T)) {
    if (!values.empty()) std::memcpy(memory_.data(), values.data(), values.size() * sizeof(T));
  }
  T* data() const { return reinterpret_cast<T*>(memory_.data()); }

 private:
  Memory memory_;
};

// Whole vectors and more, one less, and anything.
int64_t odd_size(int64_t most) {
  const int64_t choices[] = {1, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 256, 257};
  return maybe() ? any(1, most) : std::min(most, choices[any(0, 16)]);
}

// A weight with its scales, zero points and bias: [rows, columns], about as large as in a model.
struct Weight {
  int64_t type, group;  // columns of a scale
  bool has_bias, has_zero, of_halves;
  Array values, scale, bias;
  Integers<uint8_t> zero;
  Array sums;

  Weight(int64_t type, int64_t activations, int64_t rows, int64_t columns, int64_t group = 0, bool gaps = maybe())
      : type(type),
        group(type >= kInt4 ? group : columns),
        has_bias(maybe()),
        has_zero(type == kInt4 && maybe()),
        of_halves(activations == kBFloat16),
        values(type, rows, columns, columns + (gaps ? 2 * any(1, 20) : 0)),
        scale(kFloat32, type >= kInt8 ? rows : 0, columns / this->group),
        bias(activations, 1, rows),
        zero(zeros(has_zero ? rows * (columns / this->group) : 0)),
        sums(kFloat32, type == kDynamicInt4 ? rows : 0, 1) {
    const double size = 1 / std::sqrt(static_cast<double>(columns));
    const double factor = type >= kInt8 && type < kInt4 ? size / 64 : middle() > 0 ? size / 6 : size;
    values.fill([&] {
      if (type == kInt8 || type == kDynamicInt8) return static_cast<double>(any(-128, 127));
      if (type == kFloat8) return static_cast<double>(any(0, 1) * 128 + any(0, 126));
      return type >= kInt4 ? static_cast<double>(any(0, 15)) : normal() * size;
    });
    scale.fill([&] { return factor * (0.5 + static_cast<double>(any(0, 100)) / 100); });
    bias.fill(normal);
    for (int64_t row = 0; type == kDynamicInt4 && row < rows; ++row) {
      double sum = 0;
      for (int64_t i = 0; i < columns; ++i) sum += (values.get(row, i) - middle()) * scale.get(row, i / this->group);
      sums.set(row, 0, sum);
    }
  }
  static std::vector<uint8_t> zeros(int64_t count) {
    std::vector<uint8_t> all;
    for (int64_t i = 0; i < count; ++i) all.push_back(static_cast<uint8_t>(any(0, 16)));
    return all;
  }
  medusa::Matrix matrix() const {
    return {values.data(), scales(), zero_points(), biases(), values.rows(), values.stride_bytes(), type, group};
  }
  double middle() const { return type == kInt4 || type == kDynamicInt4 ? 8 : 0; }
  const float* scales() const { return type >= kInt8 ? static_cast<const float*>(scale.data()) : nullptr; }
  const uint8_t* zero_points() const {
    return type == kDynamicInt4 ? static_cast<const uint8_t*>(sums.data()) : has_zero ? zero.data() : nullptr;
  }
  const void* biases() const { return has_bias ? bias.data() : nullptr; }
  // The product with one token, and a bound of what single precision adds to it.
  struct Sum {
    double value, error;
  };
  Sum times(const double* x, int64_t row) const {
    double sum = 0, sizes = 0, unsure = 0, offset = 0;
    const double* own = values.row(row);
    std::vector<double> codes;
    if (type == kDynamicInt8 || type == kDynamicInt4) {
      float least = 0, most = 0;
      for (int64_t i = 0; i < values.columns(); ++i) {
        least = std::min(least, static_cast<float>(x[i])), most = std::max(most, static_cast<float>(x[i]));
      }
      float step = std::max((most - least) / 255, 0x1p-126f), low = std::nearbyint(least / step);
      if (type == kDynamicInt8) step = std::max(std::max(most, -least) / 127.5f, 0x1p-23f), low = -128;
      offset = std::fabs(low + 128) * step;  // what codes in a byte lack
      const float factor = 1.0f / step;
      for (int64_t i = 0; i < values.columns(); ++i) {
        const double exact = x[i] * factor, code = std::min(low + 255.0, std::max<double>(low, std::nearbyint(exact)));
        codes.push_back(code * step);
        // Halfway between two codes, rounding of the product decides.
        const double weight = (own[i] - middle()) * scale.get(row, i / group);
        if (std::fabs(std::fabs(exact - code) - 0.5) < 1e-4) unsure += std::fabs(weight) * step;
      }
      x = codes.data();
    }
    for (int64_t column = 0; column < values.columns(); ++column) {
      const int64_t at = column / group;
      const double zero_point = has_zero ? zero.data()[row * scale.columns() + at] : middle();
      const double weight = (own[column] - zero_point) * (type >= kInt8 ? scale.get(row, at) : 1);
      sum += x[column] * weight;
      sizes += (std::fabs(x[column]) + offset) * std::fabs(weight);
    }
    const double added = has_bias ? bias.get(0, row) : 0, steps = static_cast<double>(values.columns()) + 8;
    // A code's value times its scale may be rounded to bfloat16.
    const double relative = std::ldexp(steps, -24) + (type >= kInt4 && of_halves ? 0x1p-9 : 0);
    return {sum + added, relative * (sizes + std::fabs(added)) + unsure + 1e-30};
  }
  std::vector<double> times(const std::vector<double>& x) const {
    std::vector<double> all;
    for (int64_t row = 0; row < values.rows(); ++row) all.push_back(times(x.data(), row).value);
    return all;
  }
};

double activated(double x, int64_t activation) {
  const double inner = activation == medusa::kGeluTanh ? std::sqrt(8 / M_PI) * (x + 0.044715 * x * x * x) : x;
  return x / (1 + std::exp(-inner));
}
double last_place(int64_t type) { return type == kFloat32 ? 0x1p-23 : 0x1p-8; }

std::string name_of(int64_t type) {
  return std::vector<std::string>{"float32", "bfloat16", "int8", "float8", "dynamic int8", "int4", "nf4", "fp4",
                                  "dynamic int4"}[type];
}

void expect_done(int status) {
  if (status != 0) fail("refused with " + std::to_string(status));
}

void check(const char* name, int64_t index, double found, double expected, double allowed) {
  if (!(std::fabs(found - expected) <= allowed)) {
    char text[160];
    std::snprintf(text, sizeof text, "%s[%lld]: expected %.9g, got %.9g, allowed %.2g", name,
                  static_cast<long long>(index), expected, found, allowed);
    fail(text);
  }
}

void linear() {
  const int64_t type = maybe() ? kFloat32 : kBFloat16, count = any(1, 3), tokens = any(1, 40);
  const bool gate = count == 2 && maybe(), with_residual = maybe(), large = any(0, 9) == 0;
  const int64_t threads = any(1, 4), dynamic = maybe() ? kDynamicInt8 : kDynamicInt4;
  const int64_t stored = any(0, 3) == 0 ? dynamic : weight_type(type);
  const int64_t group = (stored == kDynamicInt4 ? 32 : 16) * any(1, 5);
  const int64_t columns = stored >= kInt4 ? group * any(1, 4) : odd_size(300);
  std::deque<Weight> weights;
  int64_t rows = 0;
  what = "linear " + name_of(type) + " x " + name_of(stored) + " [" + std::to_string(tokens) + ", " +
         std::to_string(columns) + "] group " + std::to_string(group) + (gate ? " gated" : "") + (with_residual ? " residual" : "") + " rows";
  for (int64_t i = 0; i < count; ++i) {
    const int64_t own = gate && i == 1 ? rows : large ? any(200, 600) : odd_size(70);
    weights.emplace_back(stored, type, own, columns, group);
    rows = gate ? own : rows + own;
    what += " " + std::to_string(own);
  }
  what += " on " + std::to_string(threads) + " threads";
  Array x(type, tokens, columns), residual(type, tokens, gate ? 2 * rows : rows), out(type, tokens, rows), alone(type, tokens, rows);
  x.fill(normal), residual.fill(normal);
  medusa::Linear call{};
  call.threads = threads, call.type = type, call.x = x.data(), call.tokens = tokens, call.columns = columns;
  call.residual = with_residual ? residual.data() : nullptr, call.out = out.data(), call.gate = gate;
  call.count = count, call.activation = any(medusa::kSilu, medusa::kGeluTanh), call.factor = gate || maybe() ? 1 : 0.3;
  for (int64_t i = 0; i < count; ++i) call.weights[i] = weights[i].matrix();
  // Two callers at once, which must not share what is not theirs.
  medusa::Linear other_call = call;
  other_call.threads = any(1, 2), other_call.out = alone.data();
  int status = 0;
  std::thread other([&] { status = medusa_decode_linear_cpu(&other_call); });
  expect_done(medusa_decode_linear_cpu(&call));
  other.join();
  expect_done(status);
  if (std::memcmp(out.data(), alone.data(), tokens * out.stride_bytes()) != 0) fail("depends on the number of threads");

  const std::vector<double> found = out.read();
  for (int64_t token = 0; token < tokens; ++token) {
    int64_t place = token * rows;
    for (int64_t i = 0; i < (gate ? 1 : count); ++i) {
      for (int64_t row = 0; row < weights[i].values.rows(); ++row, ++place) {
        const auto added = [&](Weight::Sum sum, int64_t column) {
          sum.value *= call.factor;
          if (!with_residual) return sum;
          sum.value += residual.get(token, column);
          sum.error += 0x1p-23 * (std::fabs(residual.get(token, column)) + std::fabs(sum.value));
          return sum;
        };
        Weight::Sum sum = added(weights[i].times(x.row(token), row), place - token * rows);
        if (gate) {
          const Weight::Sum other = added(weights[1].times(x.row(token), row), rows + row);
          const double gated = activated(sum.value, call.activation);
          sum.error = 1.2 * sum.error * (std::fabs(other.value) + other.error) + std::fabs(gated) * other.error +
                      0x1p-20 * std::fabs(gated * other.value);
          sum.value = gated * other.value;
        }
        check("out", place, found[place], sum.value, sum.error + last_place(type) * (std::fabs(sum.value) + sum.error));
      }
    }
  }
}

// Whole numbers, so that every order of additions gives the same sums, and ties are many, also with noise.
void argmax() {
  const int64_t type = maybe() ? kFloat32 : kBFloat16, batch = any(1, 4), nodes = any(1, 10), columns = odd_size(300);
  const int64_t tokens = batch * nodes, noises = any(1, 5);
  const bool noisy = maybe(), own_rows = maybe();
  const double divisor = maybe() ? 1 : 2;
  const int64_t rows = maybe() ? odd_size(70) : any(1, 1500), threads = any(1, 4);
  what = "argmax " + name_of(type) + " [" + std::to_string(tokens) + ", " + std::to_string(columns) + "] rows " +
         std::to_string(rows) + (noisy ? " with noise" : "") + " on " + std::to_string(threads) + " threads";
  Weight weight(type, type, rows, columns);
  weight.has_bias = false;
  weight.values.fill([] { return static_cast<double>(any(-3, 3)); });
  Array x(type, tokens, columns);
  x.fill([] { return static_cast<double>(any(-3, 3)); });
  Integers<int64_t> next(std::vector<int64_t>(tokens, -1));
  Array noise(kFloat32, batch * noises, rows);
  noise.fill([] { return static_cast<double>(any(-9, 9)); });
  std::vector<int32_t> of_nodes;
  for (int64_t i = 0; i < (own_rows ? tokens : nodes); ++i) of_nodes.push_back(static_cast<int32_t>(any(0, noises - 1)));
  Integers<int32_t> noise_rows(of_nodes);
  medusa::Argmax call{threads, type, x.data(), tokens, columns, weight.matrix(), next.data(), divisor, 0, 0.5, nullptr,
                      noise_rows.data(), nodes, noises, own_rows ? nodes : 0};
  if (noisy) call.noise = static_cast<const float*>(noise.data());
  expect_done(medusa_argmax_cpu(&call));
  for (int64_t token = 0; token < tokens; ++token) {
    int64_t best = 0;
    double most = -1e30;
    for (int64_t row = 0; row < rows; ++row) {
      double logit = rounded(weight.times(x.row(token), row).value, type) / divisor;
      const int32_t own = of_nodes[own_rows ? token : token % nodes];
      if (noisy) logit = logit / 0.5 + noise.get(token / nodes * noises + own, row);
      if (logit > most) best = row, most = logit;
    }
    check("next", token, static_cast<double>(next.data()[token]), static_cast<double>(best), 0);
  }
  if (!noisy) return;
  noise_rows.data()[any(0, static_cast<int64_t>(of_nodes.size()) - 1)] = static_cast<int32_t>(maybe() ? noises : -1);
  if (medusa_argmax_cpu(&call) != medusa::kOutside) fail("took a row outside of the noise");
}

void gumbel_noise() {
  const int64_t batch = any(1, 3), rows = any(1, 3), vocabulary = maybe() ? odd_size(300) : any(1, 9000);
  const int64_t threads = any(1, 4);
  what = "noise [" + std::to_string(batch) + ", " + std::to_string(rows) + ", " + std::to_string(vocabulary) + "] on " +
         std::to_string(threads) + " threads";
  std::vector<int64_t> keys, places;
  for (int64_t b = 0; b < batch; ++b) keys.push_back(any(INT64_MIN, INT64_MAX)), places.push_back(any(0, INT32_MAX));
  Integers<int64_t> seeds(keys), first(places);
  Array out(kFloat32, batch * rows, vocabulary);
  medusa::Noise call{threads, batch, rows, vocabulary, seeds.data(), first.data(), static_cast<float*>(out.data())};
  expect_done(medusa_gumbel_noise_cpu(&call));
  const std::vector<double> found = out.read();
  for (int64_t i = 0; i < batch * rows * vocabulary; ++i) {
    const int64_t row = i / vocabulary, token = i % vocabulary;
    uint32_t c[4] = {static_cast<uint32_t>(token / 4), static_cast<uint32_t>(places[row / rows] + row % rows), 0, 0};
    uint32_t k[2] = {static_cast<uint32_t>(keys[row / rows]), static_cast<uint32_t>(keys[row / rows] >> 32)};
    for (int round = 0; round < 10; ++round, k[0] += 0x9E3779B9, k[1] += 0xBB67AE85) {
      const uint64_t even = uint64_t{0xD2511F53} * c[0], odd = uint64_t{0xCD9E8D57} * c[2];
      const uint32_t next[4] = {static_cast<uint32_t>(odd >> 32) ^ c[1] ^ k[0], static_cast<uint32_t>(odd),
                                static_cast<uint32_t>(even >> 32) ^ c[3] ^ k[1], static_cast<uint32_t>(even)};
      std::copy(next, next + 4, c);
    }
    const float v = std::min(static_cast<float>(c[token % 4]) * 0x1p-32f + 0x1p-33f, 1 - 0x1p-24f);
    const double expected = -std::log(-std::log1p(-static_cast<double>(v)));
    check("noise", i, found[i], expected, 0x1p-20 + 0x1p-22 * std::fabs(expected));
  }
}

void heads() {
  const int64_t type = maybe() ? kFloat32 : kBFloat16, batch = any(1, 4), count = any(1, 4), threads = any(1, 4);
  const int64_t w2_type = weight_type(type), group = 16 * any(1, 3);
  const int64_t width = w2_type >= kInt4 ? group * any(1, 3) : odd_size(130);
  const bool own_hidden = maybe(), shared = maybe(), gather = any(0, 3) == 0, map = gather || maybe(), bias = maybe();
  const int64_t all = maybe() ? odd_size(70) : any(1, 900), vocabulary = gather ? any(1, all) : all;
  const int64_t k = any(1, std::min<int64_t>(vocabulary, 32)), blocks = any(1, 3);
  what = "heads " + name_of(type) + " x " + name_of(w2_type) + " [" + std::to_string(batch) + ", " +
         std::to_string(count) + ", " + std::to_string(width) + "] of " + std::to_string(vocabulary) + " best " +
         std::to_string(k) + (gather ? " gathered" : "") + (shared ? " shared" : "") + " on " +
         std::to_string(threads) + " threads, " + std::to_string(blocks) + " blocks";
  const bool has_root = maybe(), has_noise = maybe();
  what += std::string(has_root ? " root" : "") + (has_noise ? " noise" : "");
  const int64_t noise_rows = count + any(0, 2), noise_ids = gather || !map ? all : 1000 + all;
  const double temperature = maybe() ? 1 : 0.7;
  const int64_t projections = shared ? 1 : count, gap = maybe() ? 0 : any(1, 9);
  Array hidden(type, batch * (own_hidden ? count : 1), width), w1(type, count * blocks * width, width, width + gap);
  Array b1(type, count * blocks, width);
  Weight w2(w2_type, type, projections * all, width, group);
  w2.has_bias = false;
  const double size = 1 / std::sqrt(static_cast<double>(width));
  const int64_t root_width = any(1, 2 * width);
  Array root(type, batch, root_width), w_root(type, count * width, root_width, root_width + gap);
  Array noise(kFloat32, batch * noise_rows, noise_ids);
  root.fill(normal), w_root.fill([&] { return normal() * size; }), noise.fill(normal);
  hidden.fill(normal), w1.fill([&] { return normal() * size; }), b1.fill(normal);
  std::vector<int64_t> ids;
  for (int64_t id = 0; id < all; ++id) ids.push_back(gather ? id : 1000 + id);
  std::shuffle(ids.begin(), ids.end(), generator);
  ids.resize(vocabulary);
  Integers<int64_t> token_map(ids), tokens(std::vector<int64_t>(batch * count * k, -1));
  Array logprobs(kFloat32, batch * count, k);

  medusa::Heads call{};
  call.threads = threads, call.type = type, call.hidden = hidden.data();
  call.hidden_stride = own_hidden ? width : 0;
  call.batch = batch, call.heads = count, call.width = width, call.vocabulary = vocabulary, call.k = k;
  call.w1 = w1.data(), call.b1 = bias ? b1.data() : nullptr;
  call.w1_row_stride = w1.stride_bytes(), call.w1_block_stride = width * w1.stride_bytes();
  call.blocks = blocks, call.w1_stride = blocks * call.w1_block_stride;
  const int64_t w2_stride = w2.values.stride_bytes();
  call.rows = all, call.w2 = w2.values.data(), call.w2_row_stride = w2_stride, call.w2_type = w2_type;
  call.w2_stride = shared ? 0 : all * w2_stride, call.w2_group = w2.group;
  call.w2_scale = w2.scales(), call.w2_zero = w2.zero_points();
  call.scale_stride = shared || w2_type < kInt8 ? 0 : all * w2.scale.columns();
  call.token_map = map ? token_map.data() : nullptr, call.gather = gather;
  if (has_root) call.root = root.data(), call.w_root = w_root.data(), call.root_width = root_width;
  call.w_root_stride = width * w_root.stride_bytes(), call.w_root_row_stride = w_root.stride_bytes();
  call.noise = has_noise ? static_cast<const float*>(noise.data()) : nullptr;
  call.noise_rows = noise_rows, call.noise_ids = noise_ids, call.temperature = temperature;
  call.divisor = maybe() ? 1 : 2, call.softcap = maybe() ? 0 : 1.5;
  call.logprobs = static_cast<float*>(logprobs.data()), call.tokens = tokens.data();
  expect_done(medusa_heads_topk_cpu(&call));

  const std::vector<double> logprobs_found = logprobs.read();
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t head = 0; head < count; ++head) {
      const int64_t from = own_hidden ? b * count + head : b, place = b * count + head;
      std::vector<double> state(width), logits(vocabulary);
      for (int64_t row = 0; row < width; ++row) {
        double sum = 0;
        for (int64_t column = 0; column < root_width; ++column) {
          sum += root.get(b, column) * w_root.get(head * width + row, column);
        }
        state[row] = has_root ? rounded(hidden.get(from, row) + sum, type) : hidden.get(from, row);
      }
      for (int64_t block = head * blocks; block < (head + 1) * blocks; ++block) {
        const std::vector<double> before = state;
        for (int64_t row = 0; row < width; ++row) {
          double sum = bias ? b1.get(block, row) : 0;
          for (int64_t column = 0; column < width; ++column) sum += before[column] * w1.get(block * width + row, column);
          state[row] = rounded(before[row] + activated(sum, medusa::kSilu), type);
        }
      }
      double total = 0;
      for (int64_t token = 0; token < vocabulary; ++token) {
        const int64_t row = gather ? ids[token] : token, projection = shared ? 0 : head;
        const double logit = w2.times(state.data(), projection * all + row).value / call.divisor;
        logits[token] = (call.softcap > 0 ? call.softcap * std::tanh(logit / call.softcap) : logit) / temperature;
        if (has_noise) logits[token] += noise.get(b * noise_rows + head, map ? ids[token] : token);
        total += std::exp(logits[token]);
      }
      std::vector<double> sorted = logits;
      std::sort(sorted.begin(), sorted.end(), std::greater<>());
      const double allowed = type == kFloat32 ? 2e-4 : 0.2;
      std::vector<int64_t> seen;
      for (int64_t i = 0; i < k; ++i) {
        const double found = logprobs_found[place * k + i];
        const int64_t id = tokens.data()[place * k + i];
        const int64_t token = map ? std::find(ids.begin(), ids.end(), id) - ids.begin() : id;
        seen.push_back(id);
        if (token < 0 || token >= vocabulary) {
          fail("no such token: " + std::to_string(id));
          continue;
        }
        check("logprobs", place * k + i, found, sorted[i] - std::log(total), allowed);
        check("token's logprob", place * k + i, found, logits[token] - std::log(total), allowed);
      }
      std::sort(seen.begin(), seen.end());
      if (std::unique(seen.begin(), seen.end()) != seen.end()) fail("a token is there twice");
    }
  }
}

void accept() {
  medusa::Accept call{};
  call.batch = any(1, 4), call.nodes = any(1, 40), call.places = any(1, 6), call.ends = any(0, 2);
  call.hidden_bytes = any(1, 40), call.output_columns = any(1, 30), call.log_columns = any(1, 5);
  const int64_t batch = call.batch, nodes = call.nodes, places = call.places, columns = call.output_columns;
  const bool per_row = maybe();
  what = "accept of " + std::to_string(nodes) + " nodes, " + std::to_string(places) + " places";
  const auto several = [](auto example, int64_t count, int64_t low, int64_t high) {
    std::vector<decltype(example)> all;
    for (int64_t i = 0; i < count; ++i) all.push_back(static_cast<decltype(example)>(any(low, high)));
    return all;
  };
  using Longs = std::vector<int64_t>;
  using Ints = std::vector<int32_t>;
  // Few different tokens, so that paths are often right.
  const Longs tokens = several(int64_t{}, batch * nodes, 0, 1), next = several(int64_t{}, batch * nodes, 0, 1);
  const Longs eos = several(int64_t{}, call.ends, 0, 9), step = several(int64_t{}, 1, 0, call.log_columns - 1);
  const auto hidden = several(uint8_t{}, batch * nodes * call.hidden_bytes, 0, 255);
  const Ints max_new = several(int32_t{}, batch, 1, columns), log = several(int32_t{}, batch * call.log_columns, 0, 9);
  Ints lengths = several(int32_t{}, batch, 0, 99), count;
  for (const int32_t most : max_new) count.push_back(static_cast<int32_t>(any(0, most)));
  const Longs output = several(int64_t{}, batch * columns, 50, 99);
  const auto finished = several(uint8_t{}, batch, 0, 1);
  Ints depths;
  Longs paths;
  for (int64_t b = 0; b < (per_row ? batch : 1); ++b) {
    for (int64_t node = 0; node < nodes; ++node) {
      const int64_t parent = b * nodes + any(0, std::max<int64_t>(0, node - 1));
      const bool child = node > 0 && depths[parent] + 1 < places;
      depths.push_back(child ? depths[parent] + 1 : 0);
      Longs path(places, node);
      if (child) std::copy_n(&paths[parent * places], depths.back(), path.begin());
      paths.insert(paths.end(), path.begin(), path.end());
    }
  }
  const Integers<int64_t> tokens_in(tokens), next_in(next), eos_in(eos), step_in(step), paths_in(paths), output_in(output);
  const Integers<int64_t> root_in(Longs(batch, -1));
  const Integers<int32_t> depths_in(depths), max_in(max_new), log_in(log), lengths_in(lengths), count_in(count);
  const Integers<int32_t> path_in(Ints(batch * places)), accept_in{Ints(batch)}, old_in{Ints(batch)};
  const Integers<uint8_t> hidden_in(hidden), finished_in(finished), state_in(std::vector<uint8_t>(batch * call.hidden_bytes));
  call.tokens = tokens_in.data(), call.next_tokens = next_in.data(), call.hidden = hidden_in.data();
  call.depths = depths_in.data(), call.depths_stride = per_row ? nodes : 0;
  call.paths = paths_in.data(), call.paths_stride = per_row ? nodes * places : 0;
  call.eos = eos_in.data(), call.max_new = max_in.data(), call.step = step_in.data(), call.lengths = lengths_in.data();
  call.root = root_in.data(), call.state_hidden = state_in.data(), call.output = output_in.data();
  call.count = count_in.data(), call.finished = finished_in.data(), call.log = log_in.data();
  call.path = path_in.data(), call.accept_lens = accept_in.data(), call.old_lengths = old_in.data();
  const Ints checks = several(int32_t{}, batch, -99, 99);
  call.report_columns = 3 + places + any(0, 2);
  const Integers<int32_t> check_in(checks), report_in{Ints(batch * call.report_columns)};
  call.check = check_in.data(), call.report = report_in.data();
  expect_done(medusa_tree_accept_cpu(&call));

  for (int64_t b = 0; b < batch && !failed; ++b) {
    const int32_t* depth = &depths[per_row ? b * nodes : 0];
    const auto path_of = [&](int64_t node) { return &paths[((per_row ? b * nodes : 0) + node) * places]; };
    int64_t last = 0;
    for (int64_t node = 1; node < nodes; ++node) {
      const int64_t* path = path_of(node);
      int32_t right = 0;
      while (right < depth[node] && tokens[b * nodes + path[right + 1]] == next[b * nodes + path[right]]) ++right;
      // Nodes without a parent but the root are of no tree; they are depth 0 and never deeper.
      if (right == depth[node] && depth[node] > depth[last]) last = node;
    }
    Longs emitted;
    bool ends = false;
    for (int32_t i = 0; i <= depth[last] && !finished[b]; ++i) {
      if (count[b] + i >= max_new[b] || ends) break;
      emitted.push_back(next[b * nodes + path_of(last)[i]]);
      ends = std::find(eos.begin(), eos.end(), emitted.back()) != eos.end();
    }
    const auto found = static_cast<int32_t>(emitted.size());
    const bool now_finished = finished[b] || ends || count[b] + found >= max_new[b];
    Longs row(&output[b * columns], &output[b * columns] + columns);
    std::copy(emitted.begin(), emitted.end(), row.begin() + count[b]);
    for (int64_t i = 0; i < columns; ++i) {
      check("output", b * columns + i, static_cast<double>(call.output[b * columns + i]), static_cast<double>(row[i]), 0);
    }
    const int32_t accepted = finished[b] ? -1 : depth[last];
    check("count", b, call.count[b], count[b] + found, 0);
    check("finished", b, call.finished[b], now_finished, 0);
    check("log", b, call.log[b * call.log_columns + step[0]], found, 0);
    check("accept_lens", b, call.accept_lens[b], accepted, 0);
    const int32_t* report = call.report + b * call.report_columns;
    check("count in the report", b, report[0], count[b] + found, 0);
    check("finished in the report", b, report[1], now_finished, 0);
    check("check in the report", b, report[2], checks[b], 0);
    for (int64_t i = 0; i < places; ++i) {
      check("tokens in the report", b, report[3 + i], static_cast<double>(next[b * nodes + path_of(last)[i]]), 0);
    }
    check("old_lengths", b, call.old_lengths[b], lengths[b], 0);
    check("lengths", b, call.lengths[b], lengths[b] + accepted + 1, 0);
    check("root", b, static_cast<double>(call.root[b]), static_cast<double>(next[b * nodes + last]), 0);
    for (int64_t i = 0; i < places; ++i) {
      check("path", b * places + i, call.path[b * places + i], static_cast<double>(path_of(last)[i]), 0);
    }
    if (std::memcmp(static_cast<char*>(call.state_hidden) + b * call.hidden_bytes,
                    &hidden[(b * nodes + last) * call.hidden_bytes], call.hidden_bytes) != 0) {
      fail("another node's hidden state");
    }
  }
}

// The weights of a layer of the decoder.
double offset_of(const medusa::Layers& of) { return std::isnan(of.norm_offset) ? 0 : of.norm_offset; }

struct DecoderLayer {
  Array input_norm, q_norm, k_norm, post_norm, attention_norm, mlp_norm;
  Weight q, k, v, o, gate, up, down;
  int64_t window;
  bool head_norms, before, after;

  DecoderLayer(const medusa::Layers& of, int64_t weights, int64_t group, bool head_norms, bool before, bool after)
      : input_norm(of.type, 1, of.width),
        q_norm(of.type, 1, (of.whole_norms ? of.heads : 1) * of.head_dim),
        k_norm(of.type, 1, (of.whole_norms ? of.kv_heads : 1) * of.head_dim),
        post_norm(of.type, 1, of.width),
        attention_norm(of.type, 1, of.width),
        mlp_norm(of.type, 1, of.width),
        q(weights, of.type, of.heads * of.head_dim, of.width, group, false),
        k(weights, of.type, of.kv_heads * of.head_dim, of.width, group, false),
        v(weights, of.type, of.kv_heads * of.head_dim, of.width, group, false),
        o(weights, of.type, of.width, of.heads * of.head_dim, group, false),
        gate(weights, of.type, of.inner, of.width, group, false),
        up(weights, of.type, of.inner, of.width, group, false),
        down(weights, of.type, of.width, of.inner, group, false),
        window(maybe() ? 0 : any(1, 9)),
        head_norms(head_norms),
        before(before),
        after(after) {
    for (Array* norm : {&input_norm, &q_norm, &k_norm, &post_norm, &attention_norm, &mlp_norm}) {
      norm->fill([&] { return 1 - offset_of(of) + normal() / 4; });
    }
  }
  void add_pointers(std::vector<const void*>& to, std::vector<int64_t>& kinds) const {
    const auto given = [](bool is, const Array& norm) { return is ? norm.data() : nullptr; };
    to.insert(to.end(), {given(before, input_norm), given(before, post_norm), given(head_norms, q_norm),
                         given(head_norms, k_norm), given(after, attention_norm), given(after, mlp_norm)});
    for (const Weight* weight : {&q, &k, &v, &o, &gate, &up, &down}) {
      to.insert(to.end(), {weight->values.data(), weight->biases(), weight->scales(), weight->zero_points()});
      kinds.insert(kinds.end(), {weight->type, weight->group});
    }
  }
};

std::vector<double> rms_norm(const medusa::Layers& of, std::vector<double> x, const Array& weight) {
  double squares = 0;
  for (const double value : x) squares += value * value;
  const double factor = 1 / std::sqrt(squares / static_cast<double>(x.size()) + of.eps);
  for (size_t i = 0; i < x.size(); ++i) x[i] *= factor * (offset_of(of) + weight.get(0, static_cast<int64_t>(i)));
  return x;
}

void layers() {
  medusa::Layers call{};
  call.threads = any(1, 4), call.type = maybe() ? kFloat32 : kBFloat16;
  call.batch = any(1, 2), call.nodes = any(0, 5) == 0 ? any(60, 70) : any(1, 12);
  call.kv_heads = any(1, 2), call.heads = call.kv_heads * any(1, 3), call.head_dim = 2 * odd_size(20);
  // The norm of very few numbers turns the rounding of bfloat16 into another sign.
  const int64_t fewest = call.type == kBFloat16 ? 16 : 0;
  call.width = fewest + odd_size(70), call.inner = fewest + odd_size(90), call.count = any(1, 2);
  call.eps = 1e-5;
  const int64_t stored = weight_type(call.type), group = 16 * any(1, 2);
  if (stored >= kInt4) call.head_dim = group, call.width = group * any(1, 3), call.inner = group * any(1, 4);
  call.scale = 1 / std::sqrt(static_cast<double>(call.head_dim));
  call.rotated = maybe() ? call.head_dim : 2 * any(1, call.head_dim / 2);
  call.norm_offset = maybe() ? std::nan("") : static_cast<double>(any(0, 1)), call.whole_norms = maybe();
  call.activation = any(medusa::kSilu, medusa::kGeluTanh), call.factor = maybe() ? 1 : 0.3;
  call.softcap = maybe() ? 0 : 1.5;
  const bool norms_after = maybe(), norms_before = !norms_after || maybe(), several = maybe();
  const int64_t batch = call.batch, nodes = call.nodes, dim = call.head_dim, words = (nodes + 63) / 64;
  const bool head_norms = maybe(), per_row = maybe(), tables_per_row = maybe();
  what = "layers " + name_of(call.type) + " x " + name_of(stored) + " batch " + std::to_string(batch) + " nodes " +
         std::to_string(nodes) + " heads " + std::to_string(call.heads) + "/" + std::to_string(call.kv_heads) + " of " +
         std::to_string(dim) + " width " + std::to_string(call.width) + " inner " + std::to_string(call.inner) +
         (head_norms ? call.whole_norms ? " whole q_norm" : " q_norm" : "") + (norms_before ? " norms before" : "") +
         (norms_after ? " norms after" : "") + " offset " + std::to_string(call.norm_offset) + " rotated " +
         std::to_string(call.rotated) + (several ? " tables" : "") + " factor " + std::to_string(call.factor) + " cap " +
         std::to_string(call.softcap) + (call.activation == medusa::kGeluTanh ? " gelu" : "") + " on " + std::to_string(call.threads) + " threads";
  std::deque<DecoderLayer> decoder;
  std::vector<const void*> pointers;
  std::vector<int64_t> windows, kinds, tables;
  for (int64_t i = 0; i < call.count; ++i) {
    decoder.emplace_back(call, stored, group, head_norms, norms_before, norms_after).add_pointers(pointers, kinds);
    windows.push_back(decoder.back().window), tables.push_back(several ? any(0, 1) : 0);
  }
  std::vector<int32_t> lens;
  for (int64_t b = 0; b < batch; ++b) lens.push_back(static_cast<int32_t>(any(0, 40)));
  const int64_t longest = *std::max_element(lens.begin(), lens.end());
  call.rows = longest + nodes + any(0, 5), call.stored = call.sequences = batch + any(0, 2);
  const bool has_slots = maybe();
  std::vector<int32_t> slots(call.stored);  // the sequences of the batch rows, then the others
  std::iota(slots.begin(), slots.end(), 0);
  if (has_slots) std::shuffle(slots.begin(), slots.end(), generator);

  // A random tree for each row, or one for all.
  std::vector<int32_t> depths;
  std::vector<int64_t> ancestors;
  for (int64_t b = 0; b < (per_row ? batch : 1); ++b) {
    const int64_t first = b * nodes;
    ancestors.resize((first + nodes) * words);
    for (int64_t node = 0; node < nodes; ++node) {
      int64_t* own = &ancestors[(first + node) * words];
      const int64_t parent = node == 0 ? -1 : any(std::max<int64_t>(0, node - 4), node - 1);
      if (node > 0) std::copy_n(&ancestors[(first + parent) * words], words, own);
      own[node / 64] = static_cast<int64_t>(static_cast<uint64_t>(own[node / 64]) | uint64_t{1} << node % 64);
      depths.push_back(node == 0 ? 0 : depths[first + parent] + 1);
    }
  }
  const int64_t deepest = *std::max_element(depths.begin(), depths.end()), positions = longest + deepest + 1;
  const int64_t turned = call.rotated, table_rows = positions * (tables_per_row ? batch : 1);
  Array cos(call.type, table_rows * (several ? 2 : 1), turned), sin(call.type, cos.rows(), turned);
  for (int64_t row = 0; row < cos.rows(); ++row) {
    for (int64_t i = 0; i < turned; ++i) {
      const double angle = static_cast<double>(row) / (1 + static_cast<double>(i % (turned / 2)));
      cos.set(row, i, std::cos(angle)), sin.set(row, i, std::sin(angle));
    }
  }
  Integers<int64_t> kept({call.count, 1});
  call.after = kept.data(), call.states = any(0, 2);
  Array hidden(call.type, batch * nodes, call.width), out(call.type, (1 + call.states) * batch * nodes, call.width);
  Array final_norm(call.type, 1, call.width);
  hidden.fill(normal), final_norm.fill([&] { return 1 - offset_of(call) + normal() / 4; });
  const int64_t caches = call.count * 2 * call.stored * call.kv_heads;
  Array kv(call.type, caches * call.rows, dim);
  for (int64_t cache = 0; cache < caches; ++cache) {
    const auto sequence = static_cast<int32_t>(cache / call.kv_heads % call.stored);
    const int64_t b = std::find(slots.begin(), slots.end(), sequence) - slots.begin();
    const int32_t len = b < batch ? lens[b] : 0;  // the others stay NaN
    for (int64_t row = 0; row < len; ++row) {
      for (int64_t i = 0; i < dim; ++i) kv.set(cache * call.rows + row, i, normal());
    }
  }
  const std::vector<double> before = kv.read();
  Integers<int32_t> lens_given(lens), depths_given(depths);
  Integers<int32_t> slots_given(std::vector<int32_t>(slots.begin(), slots.begin() + batch));
  Integers<int64_t> ancestors_given(ancestors);
  call.hidden = hidden.data(), call.out = out.data(), call.kv = kv.data(), call.cos = cos.data(), call.sin = sin.data();
  call.table_rows = positions, call.table_stride = tables_per_row ? positions * turned : 0;
  call.tables = several ? tables.data() : nullptr, call.tables_stride = table_rows * turned;
  call.cache_lens = lens_given.data(), call.depths = depths_given.data(), call.ancestors = ancestors_given.data();
  call.depths_stride = per_row ? nodes : 0, call.ancestors_stride = per_row ? nodes * words : 0;
  call.slots = has_slots ? slots_given.data() : nullptr;
  call.final_norm = final_norm.data(), call.weights = pointers.data(), call.kinds = kinds.data();
  call.windows = windows.data();
  medusa::Layers outside = call;  // no room for the last node of the longest row
  outside.rows = longest + nodes - 1;
  if (medusa_decoder_layers_cpu(&outside) != medusa::kOutside) fail("did not refuse a row outside of the cache");
  outside = call, outside.sequences = *std::max_element(slots.begin(), slots.begin() + batch);
  if (has_slots && medusa_decoder_layers_cpu(&outside) != medusa::kOutside) fail("did not refuse a slot outside");
  expect_done(medusa_decoder_layers_cpu(&call));

  const double allowed = call.type == kFloat32 ? 1e-4 : 0.15;
  const std::vector<double> after = kv.read(), found = out.read();
  const auto cache_row = [&](int64_t layer, int64_t which, int64_t b, int64_t head, int64_t row) {
    return ((((layer * 2 + which) * call.stored + slots[b]) * call.kv_heads + head) * call.rows + row) * dim;
  };
  std::vector<std::vector<double>> state;  // of each node of each batch row
  for (int64_t i = 0; i < batch * nodes; ++i) {
    state.emplace_back();
    for (int64_t column = 0; column < call.width; ++column) state.back().push_back(hidden.get(i, column));
  }
  std::vector<double> expected = before;
  for (int64_t number = 0; number < call.count; ++number) {
    const DecoderLayer& layer = decoder[number];
    std::vector<std::vector<double>> queries(batch * nodes);
    const auto rotated = [&](const std::vector<double>& heads_of, int64_t head, int64_t b, int64_t node,
                             const Array* norm) {
      std::vector<double> x(&heads_of[head * dim], &heads_of[head * dim] + dim);
      if (norm != nullptr && !call.whole_norms) x = rms_norm(call, x, *norm);
      const int64_t row = lens[b] + depths[(per_row ? b * nodes : 0) + node] + (tables_per_row ? b * positions : 0) +
                          tables[number] * table_rows;
      std::vector<double> result = x;
      for (int64_t i = 0; i < turned; ++i) {
        const double other = i < turned / 2 ? -x[i + turned / 2] : x[i - turned / 2];
        result[i] = x[i] * cos.get(row, i) + other * sin.get(row, i);
      }
      return result;
    };
    // What a projection adds, or its norm.
    const auto add = [&](std::vector<double>& own, const Weight& weight, const std::vector<double>& x, const Array& norm) {
      std::vector<double> sums = weight.times(x);
      for (double& sum : sums) sum *= call.factor;
      if (norms_after) sums = rms_norm(call, sums, norm);
      for (int64_t i = 0; i < call.width; ++i) own[i] += sums[i];
    };
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t node = 0; node < nodes; ++node) {
        const std::vector<double>& own = state[b * nodes + node];
        const std::vector<double> normed = norms_before ? rms_norm(call, own, layer.input_norm) : own;
        std::vector<double> q = layer.q.times(normed), k = layer.k.times(normed), v = layer.v.times(normed);
        if (head_norms && call.whole_norms) q = rms_norm(call, q, layer.q_norm), k = rms_norm(call, k, layer.k_norm);
        for (int64_t head = 0; head < call.heads; ++head) {
          const std::vector<double> one = rotated(q, head, b, node, head_norms ? &layer.q_norm : nullptr);
          queries[b * nodes + node].insert(queries[b * nodes + node].end(), one.begin(), one.end());
        }
        for (int64_t head = 0; head < call.kv_heads; ++head) {
          const std::vector<double> one = rotated(k, head, b, node, head_norms ? &layer.k_norm : nullptr);
          std::copy(one.begin(), one.end(), &expected[cache_row(number, 0, b, head, lens[b] + node)]);
          std::copy_n(&v[head * dim], dim, &expected[cache_row(number, 1, b, head, lens[b] + node)]);
        }
      }
    }
    for (int64_t b = 0; b < batch; ++b) {
      const int64_t tree = per_row ? b * nodes : 0;
      for (int64_t node = 0; node < nodes; ++node) {
        std::vector<double>& own = state[b * nodes + node];
        std::vector<double> attended;
        for (int64_t head = 0; head < call.heads; ++head) {
          const int64_t kv_head = head / (call.heads / call.kv_heads);
          std::vector<double> sum(dim);
          double total = 0;
          for (int64_t row = 0; row < lens[b] + nodes; ++row) {
            const int64_t key = row - lens[b];
            const uint64_t word = key < 0 ? 0 : static_cast<uint64_t>(ancestors[(tree + node) * words + key / 64]);
            if (key >= 0 && (word >> key % 64 & 1) == 0) continue;
            const int64_t position = key < 0 ? row : lens[b] + depths[tree + key];
            if (layer.window > 0 && lens[b] + depths[tree + node] - position >= layer.window) continue;
            double score = 0;
            for (int64_t i = 0; i < dim; ++i) {
              score += queries[b * nodes + node][head * dim + i] * expected[cache_row(number, 0, b, kv_head, row) + i];
            }
            score *= call.scale;
            const double weight = std::exp(call.softcap > 0 ? call.softcap * std::tanh(score / call.softcap) : score);
            total += weight;
            for (int64_t i = 0; i < dim; ++i) sum[i] += weight * expected[cache_row(number, 1, b, kv_head, row) + i];
          }
          for (const double value : sum) attended.push_back(value / total);
        }
        add(own, layer.o, attended, layer.attention_norm);
        const std::vector<double> normed = norms_before ? rms_norm(call, own, layer.post_norm) : own;
        std::vector<double> inner = layer.gate.times(normed);
        const std::vector<double> up = layer.up.times(normed);
        for (int64_t i = 0; i < call.inner; ++i) inner[i] = activated(inner[i], call.activation) * up[i];
        add(own, layer.down, inner, layer.mlp_norm);
      }
    }
  }
  for (int64_t i = 0; call.states > 0 && i < batch * nodes; ++i) {  // after the last layer
    for (int64_t column = 0; column < call.width; ++column) {
      const int64_t place = (batch * nodes + i) * call.width + column;
      check("state", place, found[place], state[i][column], allowed * (1 + std::fabs(state[i][column])));
    }
  }
  for (int64_t i = 0; i < batch * nodes; ++i) {
    const std::vector<double> normed = rms_norm(call, state[i], final_norm);
    for (int64_t column = 0; column < call.width; ++column) {
      const int64_t place = i * call.width + column;
      check("out", place, found[place], normed[column], allowed * (1 + std::fabs(normed[column])));
    }
  }
  for (size_t i = 0; i < after.size(); ++i) {
    // What is neither prefix nor appended stays NaN.
    if (std::isnan(expected[i]) && !std::isnan(after[i])) fail("wrote to a row of the cache that is not the tree's");
    if (std::isnan(expected[i])) continue;
    const double may = std::isnan(before[i]) ? allowed * (1 + std::fabs(expected[i])) : 0;
    check("kv", static_cast<int64_t>(i), after[i], expected[i], may);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int cases = argc > 1 ? std::atoi(argv[1]) : 100;
  const struct {
    const char* name;
    void (*run)();
    int cases;
  } ops[] = {{"decode_linear", linear, cases}, {"argmax", argmax, cases / 3 + 1}, {"heads_topk", heads, cases / 3 + 1},
             {"gumbel_noise", gumbel_noise, cases / 3 + 1}, {"decoder_layers", layers, cases / 3 + 1}, {"tree_accept", accept, cases}};
  if (__sanitizer_set_death_callback != nullptr) __sanitizer_set_death_callback(say_case);
  int sets = 0, all_wrong = 0;
  for (const char* isa : {"base", "avx2", "avx512", "avx512_bf16"}) {
    if (medusa_cpu_use(isa) != 0) {
      std::printf("%s: not built, or not of this CPU\n", isa);
      continue;
    }
    ++sets;
    if (std::strcmp(medusa_cpu_isa(), isa) != 0) {
      std::printf("wrong: medusa_cpu_isa: expected %s, got %s\n", isa, medusa_cpu_isa());
      ++all_wrong;
    }
    for (const auto& op : ops) {
      int wrong = 0;
      for (int seed = 0; seed < op.cases; ++seed) {
        generator.seed(static_cast<unsigned>(seed));
        where = std::string(isa) + ", seed " + std::to_string(seed);
        failed = false;
        op.run();
        wrong += failed;
      }
      std::printf("%s: %d cases of %s, %d wrong\n", isa, op.cases, op.name, wrong);
      std::fflush(stdout);
      all_wrong += wrong;
    }
  }
  return all_wrong > 0 || sets == 0 ? 1 : 0;
}
