// How instructions that are not elementwise are made: a builder per opcode, registered next to its handlers.
#pragma once
#include <string>
#include <unordered_map>

#include "machine.h"

namespace ptx {

// Why a kernel cannot be parsed.
struct ParseError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Operand {
  std::vector<std::string> items;  // one, or those of a vector {a, b}
  bool vector = false, negated = false;
  s64 offset = 0;       // of an address [a + 16]
  std::string second;  // of a result a|b
};

class Parser;

// An instruction that is being parsed.
struct Build {
  Parser& parser;
  Kernel& kernel;
  Instruction& i;
  std::string opcode;
  std::vector<std::string> words;  // of the opcode, split at its dots
  std::vector<Operand> operands;
  u8 width = 0;            // bytes of the type in its last word
  bool with_sign = false;  // of that type

  bool has(const std::string& word) const { return std::find(words.begin() + 1, words.end(), word) != words.end(); }
  const Operand& operand(size_t n) const;
  // The registers of an operand; constants and special registers get one. `one` and `address` check its width.
  Register one(size_t n, u8 width);
  Registers registers(size_t n, u8 width);
  Register second(size_t n);  // the predicate q of a result p|q
  Registers address(size_t n, Space space);  // sets i.space and i.offset
  u64 number(size_t n) const;
  // The index of the one word of a list that the opcode has.
  u8 choose(const std::vector<std::string>& list) const;
  [[noreturn]] void refuse(const std::string& what) const;
};

using Builder = void (*)(Build&);
using Builders = std::unordered_map<std::string, Builder>;

const Builders& builders();  // by the first word of the opcode
void add_memory(Builders&);
void add_warp(Builders&);
void add_matrix(Builders&);
void add_control(Builders&);

}  // namespace ptx
