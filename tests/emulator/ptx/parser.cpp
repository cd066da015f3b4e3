// Reads PTX as Triton and nvcc write it: one kernel, its registers, labels and instructions.
#include "parser.h"

#include <cctype>
#include <cstring>
#include <map>

#include "build.h"
#include "table.h"

namespace ptx {
namespace {

std::vector<std::string> split(const std::string& text, char by) {
  std::vector<std::string> parts(1);
  int depth = 0;
  for (char x : text) {
    depth += (x == '{' || x == '[') - (x == '}' || x == ']');
    if (x == by && !depth) parts.emplace_back();
    else parts.back() += x;
  }
  return parts;
}

std::string trimmed(const std::string& text) {
  const size_t first = text.find_first_not_of(" \t\r\n"), last = text.find_last_not_of(" \t\r\n");
  return first == std::string::npos ? "" : text.substr(first, last - first + 1);
}

// Words between white space.
std::vector<std::string> words_of(const std::string& text) {
  std::vector<std::string> words(1);
  for (char x : text) {
    if (!std::isspace(static_cast<unsigned char>(x))) words.back() += x;
    else if (!words.back().empty()) words.emplace_back();
  }
  if (words.back().empty()) words.pop_back();
  return words;
}

// Bytes of a type such as "b32", and whether it has a sign; 0 bytes if it is no type.
std::pair<u8, bool> type_of(const std::string& name) {
  static const std::unordered_map<std::string, std::pair<u8, bool>> kTypes = [] {
    std::unordered_map<std::string, std::pair<u8, bool>> types = {
        {"pred", {1, false}}, {"f16", {2, false}},   {"bf16", {2, false}}, {"f16x2", {4, false}}, {"bf16x2", {4, false}},
        {"f32", {4, false}},  {"tf32", {4, false}}, {"f64", {8, false}},  {"b128", {16, false}}};
    for (const auto& [bits, size] : {std::pair<std::string, u8>{"8", 1}, {"16", 2}, {"32", 4}, {"64", 8}}) {
      types["b" + bits] = types["u" + bits] = {size, false};
      types["s" + bits] = {size, true};
    }
    return types;
  }();
  const auto found = kTypes.find(name);
  return found == kTypes.end() ? std::pair<u8, bool>{0, false} : found->second;
}

const std::unordered_map<std::string, Special> kSpecials = {
    {"%tid.x", Special::TidX},     {"%tid.y", Special::TidY},     {"%tid.z", Special::TidZ},       {"%ntid.x", Special::NtidX},
    {"%ntid.y", Special::NtidY},   {"%ntid.z", Special::NtidZ},   {"%ctaid.x", Special::CtaX},     {"%ctaid.y", Special::CtaY},
    {"%ctaid.z", Special::CtaZ},   {"%nctaid.x", Special::NctaX}, {"%nctaid.y", Special::NctaY},   {"%nctaid.z", Special::NctaZ},
    {"%laneid", Special::Lane},    {"%warpid", Special::Warp},    {"%cluster_ctarank", Special::Zero}, {"%cluster_ctaid.x", Special::Zero}};

// The key of an opcode in the table: see table.h.
std::string key_of(const std::vector<std::string>& words) {
  std::string key = words[0];
  bool ftz = false;
  for (size_t n = 1; n < words.size(); ++n) {
    const std::string& word = words[n];
    if (word == "ftz") ftz = true;
    else if (word == "rn" || word == "approx" || word == "full") continue;
    else if (word == "b16" || word == "b32" || word == "b64") key += ".u" + word.substr(1);
    else key += "." + word;
  }
  return ftz ? "ftz." + key : key;
}

bool read_number(std::string text, u64& value) {
  if (text.size() > 2 && text[0] == '0' && std::strchr("fFdD", text[1])) {  // the bits of a float or a double
    value = std::stoull(text.substr(2), nullptr, 16);
    return true;
  }
  while (!text.empty() && (text.back() == 'U' || text.back() == 'u')) text.pop_back();
  if (text.empty() || !(std::isdigit(static_cast<unsigned char>(text[0])) || (text[0] == '-' && text.size() > 1))) return false;
  value = text[0] == '-' ? static_cast<u64>(std::stoll(text, nullptr, 0)) : std::stoull(text, nullptr, 0);
  return true;
}

// Between integers: value: bytes of the source, with_sign: whether it has one; size: bytes of the result, flag: its sign.
void convert_integers(Context& c, const Instruction& i, u32 mask) {
  for_lanes(mask, [&](u32 lane) { c.put(i.d[0], lane, extend(extend(c.get(i.a[0], lane), i.value, i.with_sign), i.size, i.flag)); });
}

// mov between a register and a vector of narrower ones.
void repack(Context& c, const Instruction& i, u32 mask) {
  for_lanes(mask, [&](u32 lane) {
    u64 x = 0;
    u32 shift = 0;
    for (const Register& part : i.a) {
      x |= c.get(part, lane) << shift;
      shift += 8 * part.width;
    }
    const u32 bits = shift / static_cast<u32>(i.d.size());
    for (size_t n = 0; n < i.d.size(); ++n) c.put(i.d[n], lane, x >> bits * n);
  });
}

}  // namespace

class Parser {
 public:
  explicit Parser(const std::string& text) : text_(text) {}

  Kernel parse(const std::string& entry) {
    read_files();
    size_t at = 0, open = 0;
    do {
      at = text_.find(".entry", at);
      if (at == std::string::npos) throw ParseError("expected a kernel " + entry + ", got none of that name");
      open = text_.find('(', at);
      kernel_.name = trimmed(text_.substr(at + 6, open - at - 6));
      at = open;
    } while (kernel_.name != entry);
    const size_t close = text_.find(')', open), body = text_.find('{', close);
    parameters(text_.substr(open + 1, close - open - 1));
    const std::string directives = text_.substr(close, body - close);
    if (const size_t found = directives.find(".reqntid"); found != std::string::npos)
      kernel_.threads = static_cast<u32>(std::stoul(directives.substr(found + 8)));
    line_ = 1 + static_cast<u32>(std::count(text_.begin(), text_.begin() + static_cast<std::ptrdiff_t>(body), '\n'));
    scopes_.emplace_back();
    statements(body + 1);
    for (const auto& [index, label] : jumps_) {
      const auto found = labels_.find(label);
      if (found == labels_.end()) throw ParseError("a branch to " + label + ", which is not there");
      kernel_.code[index].target = found->second;
    }
    Instruction end;
    end.kind = Kind::Exit;
    end.text = "end of the kernel";
    kernel_.code.push_back(end);
    for (const auto& [key, place] : constants_) kernel_.constants.push_back({place, key.second});
    for (const auto& [special, place] : specials_) kernel_.specials.push_back({place, special});
    return std::move(kernel_);
  }

  // The register of a token; a constant or special register gets one of its own.
  Register find(const std::string& token, u8 width) {
    if (token == "_") return {};
    if (const Register* found = declared(token)) return *found;
    if (const auto special = kSpecials.find(token); special != kSpecials.end()) {
      const auto [at, fresh] = specials_.try_emplace(special->second);
      if (fresh) at->second = allocate(4);
      return at->second;
    }
    u64 value = 0;
    const auto named = [&](const Parameter& p) { return p.name == token; };
    if (token == "WARP_SZ") value = kLanes;
    else if (token == "global_smem") value = kSharedBase;
    else if (const auto p = std::find_if(kernel_.parameters.begin(), kernel_.parameters.end(), named); p != kernel_.parameters.end())
      value = p->offset;
    else if (!read_number(token, value)) throw ParseError("unknown operand " + token);
    value = extend(value, width, false);
    const auto [at, fresh] = constants_.try_emplace({width, value});
    if (fresh) at->second = allocate(width);
    return at->second;
  }

 private:
  const std::string& text_;
  Kernel kernel_;
  std::vector<std::unordered_map<std::string, Register>> scopes_;
  std::unordered_map<std::string, u32> labels_;
  std::vector<std::pair<u32, std::string>> jumps_;
  std::map<std::pair<u8, u64>, Register> constants_;
  std::map<Special, Register> specials_;
  u32 line_ = 0, source_file_ = 0, source_line_ = 0;
  bool within_asm_ = false;

  void read_files() {
    for (size_t at = 0; (at = text_.find(".file", at)) != std::string::npos; ++at) {
      const size_t from = text_.find('"', at), to = text_.find('"', from + 1), line_end = text_.find('\n', at);
      if (from > line_end) continue;
      const size_t index = std::stoul(text_.substr(at + 5));
      if (kernel_.files.size() <= index) kernel_.files.resize(index + 1);
      kernel_.files[index] = text_.substr(from + 1, to - from - 1);
    }
  }

  void parameters(const std::string& text) {
    for (const std::string& part : split(text, ',')) {
      const std::vector<std::string> words = words_of(part);  // .param .u64 .ptr .global .align 1 name, or .b8 name[16]
      if (words.size() < 3) continue;
      u32 align = type_of(words[1].substr(1)).first, size = align;
      std::string name = words.back();
      const auto aligned = std::find(words.begin(), words.end(), ".align");
      if (words[1] != ".u64" && aligned != words.end()) align = static_cast<u32>(std::stoul(*(aligned + 1)));
      if (const size_t bracket = name.find('['); bracket != std::string::npos) {
        size *= static_cast<u32>(std::stoul(name.substr(bracket + 1)));
        name.resize(bracket);
      }
      kernel_.parameter_bytes = (kernel_.parameter_bytes + align - 1) / align * align;
      kernel_.parameters.push_back({name, kernel_.parameter_bytes, size});
      kernel_.parameter_bytes += size;
    }
  }

  Register allocate(u8 width) {
    kernel_.register_bytes = (kernel_.register_bytes + 63) / 64 * 64;
    const Register place{kernel_.register_bytes, width};
    kernel_.register_bytes += kLanes * width;
    return place;
  }

  // Divides the body into statements, labels and scopes, and keeps count of lines.
  void statements(size_t at) {
    std::string statement;
    u32 begin = line_;
    int braces = 0;  // of vectors of registers
    const auto blank = [&] { return statement.find_first_not_of(" \t\r") == std::string::npos; };
    for (; at < text_.size(); ++at) {
      const char x = text_[at];
      if (x == '/' && text_[at + 1] == '/') {
        if (text_.compare(at, 19, "// begin inline asm") == 0) within_asm_ = true;
        if (text_.compare(at, 17, "// end inline asm") == 0) within_asm_ = false;
        while (text_[at + 1] != '\n') ++at;
      } else if (x == '/' && text_[at + 1] == '*') {
        for (++at; !(text_[at] == '*' && text_[at + 1] == '/'); ++at) line_ += text_[at] == '\n';
        ++at;
      } else if (x == '\n') {
        ++line_;
        const std::string directive = trimmed(statement);
        // Within inline assembly LLVM counts its lines on from that of the source.
        if (directive.starts_with(".loc") && !within_asm_) location(directive);
        if (directive.starts_with(".loc") || directive.starts_with(".file")) statement.clear();
        else statement += ' ';
      } else if (x == '{' && blank()) {
        scopes_.emplace_back();
      } else if (x == '}' && blank()) {
        scopes_.pop_back();
        if (scopes_.empty()) return;
      } else if (x == ':' && !braces && text_[at + 1] != ':' && text_[at - 1] != ':' && words_of(statement).size() == 1) {
        labels_[trimmed(statement)] = static_cast<u32>(kernel_.code.size());
        statement.clear();
      } else if (x == ';') {
        if (!blank()) read(statement, begin);
        statement.clear();
        braces = 0;
      } else {
        if (blank()) begin = line_;
        braces += (x == '{') - (x == '}');
        statement += x;
      }
    }
  }

  void location(const std::string& text) {  // .loc FILE LINE COLUMN
    const std::vector<std::string> words = words_of(text);
    source_file_ = static_cast<u32>(std::stoul(words.at(1)));
    source_line_ = static_cast<u32>(std::stoul(words.at(2)));
  }

  void read(const std::string& statement, u32 line) {
    std::vector<std::string> words = words_of(statement);
    if (words[0] == ".reg") return registers(words);
    if (words[0] == ".pragma") return;
    Instruction i;
    i.line = line;
    i.source_file = source_file_;
    i.source_line = source_line_;
    for (const std::string& word : words) i.text += (i.text.empty() ? "" : " ") + word;
    try {
      if (words[0][0] == '.') throw ParseError("unknown directive");
      if (words[0][0] == '@') {
        i.guarded = true;
        i.negated = words[0][1] == '!';
        const Register guard = find(words[0].substr(1 + i.negated), 1);
        if (guard.width != 1) throw ParseError("a guard that is no predicate");
        i.guard = guard.offset;
        words.erase(words.begin());
      }
      std::string rest;
      for (size_t n = 1; n < words.size(); ++n) rest += words[n];
      Build o{*this, kernel_, i, words[0], split(words[0], '.'), {}};
      if (!rest.empty())
        for (const std::string& part : split(rest, ',')) o.operands.push_back(operand(part));
      std::tie(o.width, o.with_sign) = type_of(o.words.back());
      build(o);
    } catch (const std::exception& error) {
      throw ParseError("line " + std::to_string(line) + ", `" + i.text + "`: " + error.what());
    }
    kernel_.code.push_back(i);
  }

  void registers(const std::vector<std::string>& words) {  // .reg .b32 %r<12> or .reg .pred p, q
    const u8 width = type_of(words.at(1).substr(1)).first;
    std::string names;
    for (size_t n = 2; n < words.size(); ++n) names += words[n];
    for (const std::string& name : split(names, ',')) {
      const size_t angle = name.find('<');
      if (angle == std::string::npos) scopes_.back()[name] = allocate(width);
      else
        for (u32 n = 0, count = static_cast<u32>(std::stoul(name.substr(angle + 1))); n < count; ++n)
          scopes_.back()[name.substr(0, angle) + std::to_string(n)] = allocate(width);
    }
  }

  const Register* declared(const std::string& name) const {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope)
      if (const auto found = scope->find(name); found != scope->end()) return &found->second;
    return nullptr;
  }

  static Operand operand(std::string text) {
    Operand o;
    if (text[0] == '[') {
      text = text.substr(1, text.rfind(']') - 1);
      if (const size_t plus = text.find('+'); plus != std::string::npos) {
        o.offset = std::stoll(text.substr(plus + 1), nullptr, 0);
        text.resize(plus);
      }
      o.items = {text};
    } else if (text[0] == '{') {
      o.vector = true;
      o.items = split(text.substr(1, text.rfind('}') - 1), ',');
    } else {
      if (const size_t bar = text.find('|'); bar != std::string::npos) {
        o.second = text.substr(bar + 1);
        text.resize(bar);
      }
      o.negated = text[0] == '!';
      o.items = {text.substr(o.negated)};
    }
    return o;
  }

  void build(Build& o) {
    const std::string& name = o.words[0];
    if (name == "bra") {
      o.i.kind = Kind::Branch;
      jumps_.push_back({static_cast<u32>(kernel_.code.size()), o.operand(0).items[0]});
      return;
    }
    if (const auto builder = builders().find(name); builder != builders().end()) return builder->second(o);
    if ((name == "mov") && (o.operand(0).vector || o.operand(1).vector)) {
      o.i.d = o.registers(0, o.width);
      o.i.a = o.registers(1, o.width);
      o.i.run = &repack;
      return;
    }
    if (name == "cvt" && integers(o)) return;
    if (name == "cvta") o.words = {"mov", o.words.back()};
    std::string key = key_of(o.words);
    if (key == "cvt.f32.s8" && find(o.operand(1).items[0], 2).width == 1) key += " of 8 bits";
    const auto found = elementwise().find(key);
    if (found == elementwise().end()) throw ParseError("the emulator does not know this instruction");
    const Row& row = found->second;
    if (o.operands.size() != row.widths.size())
      throw ParseError("expected " + std::to_string(row.widths.size()) + " operands, got " + std::to_string(o.operands.size()));
    for (size_t n = 0; n < row.widths.size(); ++n) {
      if (!o.operands[n].second.empty() || o.operands[n].negated) throw ParseError("a form of operand " + std::to_string(n));
      o.i.at[n] = o.one(n, row.widths[n]).offset;
    }
    o.i.run = row.run;
  }

  // cvt from integer to integer, whose registers may be wider than the numbers; false if it is another one.
  static bool integers(Build& o) {
    const std::string& to = o.words[o.words.size() - 2];
    const auto whole = [](const std::string& type) { return type[0] == 'u' || type[0] == 's' || type[0] == 'b'; };
    if (o.words.size() != 3 || !whole(to) || !whole(o.words.back()) || to[1] == 'f' || o.words.back()[1] == 'f') return false;
    std::tie(o.i.size, o.i.flag) = type_of(to);
    o.i.value = o.width;
    o.i.with_sign = o.with_sign;
    o.i.d = o.registers(0, static_cast<u8>(o.i.size));
    o.i.a = o.registers(1, o.width);
    o.i.run = &convert_integers;
    return true;
  }
};

const Operand& Build::operand(size_t n) const {
  if (n >= operands.size()) refuse("operand " + std::to_string(n) + " is missing");
  return operands[n];
}

Register Build::one(size_t n, u8 width) {
  const Register found = parser.find(operand(n).items[0], width);
  if (operand(n).vector || found.width != width)
    refuse("operand " + std::to_string(n) + " has " + std::to_string(found.width) + " bytes, expected " + std::to_string(width));
  return found;
}

Registers Build::registers(size_t n, u8 width) {
  Registers out;
  for (const std::string& item : operand(n).items) out.push_back(parser.find(item, width));
  return out;
}

Register Build::second(size_t n) { return parser.find(operand(n).second, 1); }

Registers Build::address(size_t n, Space space) {
  i.space = space;
  i.offset = operand(n).offset;
  const Registers found = registers(n, space == Space::Shared ? 4 : 8);
  if (found[0].width != (space == Space::Shared ? 4 : 8)) refuse("an address of " + std::to_string(found[0].width) + " bytes");
  return found;
}

u64 Build::number(size_t n) const {
  u64 value = 0;
  if (!read_number(operand(n).items[0], value)) refuse("operand " + std::to_string(n) + " must be a number");
  return value;
}

u8 Build::choose(const std::vector<std::string>& list) const {
  for (size_t n = 0; n < list.size(); ++n)
    if (has(list[n])) return static_cast<u8>(n);
  refuse("none of the operations that the emulator knows");
}

void Build::refuse(const std::string& what) const { throw ParseError("the emulator does not know this: " + what); }

Kernel parse(const std::string& text, const std::string& entry) { return Parser(text).parse(entry); }

}  // namespace ptx
