#include "gguf.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <limits>
#include <string_view>
#include <unordered_set>

namespace gguf {
namespace {

// ggml's types: a row of a tensor is blocks of `block` elements, `bytes` each.
struct TypeTraits {
  std::uint32_t type;
  const char* name;
  std::int64_t block;
  std::int64_t bytes;
};

constexpr TypeTraits kTypes[] = {
    {0, "F32", 1, 4},         {1, "F16", 1, 2},
    {2, "Q4_0", 32, 18},      {3, "Q4_1", 32, 20},
    {6, "Q5_0", 32, 22},      {7, "Q5_1", 32, 24},
    {8, "Q8_0", 32, 34},      {9, "Q8_1", 32, 36},
    {10, "Q2_K", 256, 84},    {11, "Q3_K", 256, 110},
    {12, "Q4_K", 256, 144},   {13, "Q5_K", 256, 176},
    {14, "Q6_K", 256, 210},   {15, "Q8_K", 256, 292},
    {16, "IQ2_XXS", 256, 66}, {17, "IQ2_XS", 256, 74},
    {18, "IQ3_XXS", 256, 98}, {19, "IQ1_S", 256, 50},
    {20, "IQ4_NL", 32, 18},   {21, "IQ3_S", 256, 110},
    {22, "IQ2_S", 256, 82},   {23, "IQ4_XS", 256, 136},
    {24, "I8", 1, 1},         {25, "I16", 1, 2},
    {26, "I32", 1, 4},        {27, "I64", 1, 8},
    {28, "F64", 1, 8},        {29, "IQ1_M", 256, 56},
    {30, "BF16", 1, 2},       {34, "TQ1_0", 256, 54},
    {35, "TQ2_0", 256, 66},   {39, "MXFP4", 32, 17},
    {40, "NVFP4", 64, 36},    {kTypeQ1_0, "Q1_0", 128, 18},
};

const TypeTraits* find_type(std::uint32_t type) {
  for (const TypeTraits& traits : kTypes) {
    if (traits.type == type) return &traits;
  }
  return nullptr;
}

// The types of a metadata value.
enum ValueType : std::uint32_t {
  kUint8,
  kInt8,
  kUint16,
  kInt16,
  kUint32,
  kInt32,
  kFloat32,
  kBool,
  kString,
  kArray,
  kUint64,
  kInt64,
  kFloat64,
};

// Bytes of a scalar value, or 0 if `type` is not a scalar.
std::uint64_t scalar_bytes(std::uint32_t type) {
  switch (type) {
    case kUint8:
    case kInt8:
    case kBool:
      return 1;
    case kUint16:
    case kInt16:
      return 2;
    case kUint32:
    case kInt32:
    case kFloat32:
      return 4;
    case kUint64:
    case kInt64:
    case kFloat64:
      return 8;
    default:
      return 0;
  }
}

// The smallest encodings, which bound every count by the bytes that are left.
constexpr std::uint64_t kMinString = 8;
constexpr std::uint64_t kMinMetadata = kMinString + 4 + 1;
constexpr std::uint64_t kMinTensorInfo = kMinString + 4 + 4 + 8;

// The format's limit on a metadata key. It asks for tensor names of at most 64 bytes, but builds of
// ggml with a higher limit write longer ones.
constexpr std::uint64_t kMaxKey = 65535;

constexpr std::uint64_t kMaxElements = std::numeric_limits<std::int64_t>::max();

std::string text(const char* value) { return value; }
std::string text(const std::string& value) { return value; }
std::string text(std::uint64_t value) { return std::to_string(value); }

std::string quoted(std::string_view value) { return "'" + printable(value) + "'"; }

}  // namespace

std::string type_name(std::uint32_t type) {
  const TypeTraits* traits = find_type(type);
  return traits != nullptr ? traits->name : "type " + std::to_string(type);
}

std::string printable(std::string_view value) {
  constexpr std::size_t kShown = 80;
  static const char digits[] = "0123456789abcdef";
  std::string result;
  for (const char c : value.substr(0, kShown)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte >= 0x7f) {
      result += "\\x";
      result += digits[byte >> 4];
      result += digits[byte & 15];
    } else {
      result += c;
    }
  }
  return result + (value.size() > kShown ? "..." : "");
}

std::int64_t Tensor::k() const { return dims.empty() ? 1 : dims[0]; }

std::int64_t Tensor::n() const {
  std::int64_t rows = 1;
  for (std::size_t i = 1; i < dims.size(); ++i) rows *= dims[i];
  return rows;
}

class Parser {
 public:
  Parser(const void* bytes, std::size_t size, const std::string& name)
      : begin_(static_cast<const char*>(bytes)), size_(size), file_name_(name) {}

  File parse() {
    file_.bytes_ = size_;
    read_magic_and_version();
    const auto tensor_count = read<std::uint64_t>("the tensor count");
    const auto metadata_count = read<std::uint64_t>("the metadata count");
    check_count("tensor count", tensor_count, kMinTensorInfo);
    check_count("metadata count", metadata_count, kMinMetadata);
    file_.metadata_count_ = metadata_count;
    for (std::uint64_t i = 0; i < metadata_count; ++i) read_metadata();
    // Each tensor's count of bytes was only bounded by what was left before the metadata.
    check_count("tensor count", tensor_count, kMinTensorInfo);
    read_tensors(tensor_count);
    return std::move(file_);
  }

 private:
  template <class... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    std::string message = file_name_ + ": ";
    ((message += text(parts)), ...);
    throw Error(message);
  }

  std::uint64_t left() const { return size_ - position_; }

  void need(std::uint64_t bytes, const std::string& what) const {
    if (bytes > left()) {
      fail("truncated: ", what, " needs ", bytes, " bytes at offset ", position_, ", but only ",
           left(), " of the file's ", size_, " are left");
    }
  }

  // Integers are little-endian, as are the hosts that the library supports; nothing is aligned.
  template <class T>
  T read(const std::string& what) {
    need(sizeof(T), what);
    T value;
    std::memcpy(&value, begin_ + position_, sizeof(T));
    position_ += sizeof(T);
    return value;
  }

  std::string_view read_string(const std::string& what, std::uint64_t max_length) {
    const auto length = read<std::uint64_t>("the length of " + what);
    if (length > max_length) {
      fail(what, " has length ", length, ", above the limit of ", max_length, " bytes");
    }
    need(length, what);
    const std::string_view value(begin_ + position_, length);
    position_ += length;
    return value;
  }

  void check_count(const char* what, std::uint64_t count, std::uint64_t min_bytes) const {
    if (count > left() / min_bytes) {
      fail(what, " = ", count, " is absurd: each takes at least ", min_bytes, " bytes, and only ",
           left(), " of the file's ", size_, " are left");
    }
  }

  void read_magic_and_version() {
    need(4, "the magic number");
    if (std::memcmp(begin_, "GGUF", 4) != 0) {
      fail("not a GGUF file: it starts with ", quoted({begin_, 4}), ", not 'GGUF'");
    }
    position_ = 4;
    const auto version = read<std::uint32_t>("the version");
    if (version != 0 && (version & 0xffffu) == 0) {
      const std::uint32_t swapped = version >> 24 | (version >> 8 & 0xff00u);
      fail("big-endian file (its version reads ", version, ", byte-swapped ", swapped,
           "); only little-endian files are read");
    }
    if (version != 2 && version != 3) {
      fail("GGUF version ", version, " is not read; versions 2 and 3 are");
    }
    file_.version_ = version;
  }

  void read_metadata() {
    const std::string_view key = read_string("a metadata key", kMaxKey);
    if (!keys_.insert(key).second) fail("metadata key ", quoted(key), " appears twice");
    const std::string what = "metadata " + quoted(key);
    const auto type = read<std::uint32_t>("the type of " + what);
    if (key == "general.alignment") {
      if (type != kUint32) fail(what, " has value type ", type, ", not ", kUint32, " (uint32)");
      const auto alignment = read<std::uint32_t>(what);
      if (alignment == 0 || (alignment & (alignment - 1)) != 0) {
        fail(what, " = ", alignment, " must be a power of two");
      }
      file_.alignment_ = alignment;
    } else if (key == "general.architecture" || key == "general.name") {
      if (type != kString) fail(what, " has value type ", type, ", not ", kString, " (string)");
      const std::string_view value = read_string(what, size_);
      (key == "general.name" ? file_.name_ : file_.architecture_) = value;
    } else {
      skip_value(type, what);
    }
  }

  void skip_value(std::uint32_t type, const std::string& what) {
    if (type == kString) {
      read_string(what, size_);
    } else if (type == kArray) {
      skip_array(what);
    } else if (const std::uint64_t bytes = scalar_bytes(type); bytes != 0) {
      need(bytes, what);
      position_ += bytes;
    } else {
      fail(what, " has value type ", type, ", which GGUF does not define (0 to ", kFloat64, ")");
    }
  }

  void skip_array(const std::string& what) {
    const auto type = read<std::uint32_t>("the element type of " + what);
    const auto count = read<std::uint64_t>("the element count of " + what);
    if (type == kArray) fail(what, " is an array of arrays, which is not read");
    const std::uint64_t bytes = type == kString ? kMinString : scalar_bytes(type);
    if (bytes == 0) {
      fail(what, " is an array of value type ", type, ", which GGUF does not define (0 to ",
           kFloat64, ")");
    }
    if (count > left() / bytes) {
      fail(what, " is an array of ", count, " elements of at least ", bytes, " bytes, but only ",
           left(), " of the file's ", size_, " bytes are left");
    }
    if (type != kString) {
      position_ += count * bytes;
      return;
    }
    for (std::uint64_t i = 0; i < count; ++i) read_string(what, size_);
  }

  void read_tensors(std::uint64_t count) {
    std::vector<std::uint64_t> offsets;
    for (std::uint64_t i = 0; i < count; ++i) offsets.push_back(read_tensor_info());
    if (count == 0) return;
    // The data starts at the next multiple of the alignment, and offsets count from there.
    const std::uint64_t padding = (0 - position_) & (std::uint64_t{file_.alignment_} - 1);
    need(padding, "the padding before the tensor data");
    position_ += padding;
    for (std::size_t i = 0; i < offsets.size(); ++i) place(file_.tensors_[i], offsets[i]);
  }

  // Reads one tensor's name, dimensions and type; returns its offset in the data.
  std::uint64_t read_tensor_info() {
    const std::string_view name = read_string("a tensor name", kMaxKey);
    if (!tensor_names_.insert(name).second) fail("tensor ", quoted(name), " appears twice");
    const std::string what = "tensor " + quoted(name);
    const auto dim_count = read<std::uint32_t>("the dimension count of " + what);
    if (dim_count > kMaxDims) {
      fail(what, " has ", dim_count, " dimensions, above the limit of ", kMaxDims);
    }
    Tensor tensor;
    tensor.name = name;
    std::uint64_t elements = 1;
    for (std::uint32_t i = 0; i < dim_count; ++i) {
      const auto dim = read<std::uint64_t>("the dimensions of " + what);
      if (dim == 0) fail(what, ": dimension ", i, " is 0");
      if (dim > kMaxElements / elements) {
        fail(what, ": dimension ", i, " = ", dim, " makes the element count overflow 63 bits");
      }
      elements *= dim;
      tensor.dims.push_back(static_cast<std::int64_t>(dim));
    }
    tensor.type = read<std::uint32_t>("the type of " + what);
    const auto offset = read<std::uint64_t>("the offset of " + what);
    if (const TypeTraits* traits = find_type(tensor.type); traits != nullptr) {
      if (tensor.k() % traits->block != 0) {
        fail(what, ": K = ", static_cast<std::uint64_t>(tensor.k()), " must be a multiple of ",
             static_cast<std::uint64_t>(traits->block), ", the block of ", traits->name);
      }
      const std::uint64_t blocks = elements / static_cast<std::uint64_t>(traits->block);
      const auto block_bytes = static_cast<std::uint64_t>(traits->bytes);
      if (blocks > kMaxElements / block_bytes) {
        fail(what, ": ", blocks, " blocks of ", block_bytes, " bytes overflow a 63-bit byte count");
      }
      tensor.bytes = blocks * block_bytes;
    }
    file_.tensors_.push_back(std::move(tensor));
    return offset;
  }

  // Points the tensor at its data, `offset` from the current position.
  void place(Tensor& tensor, std::uint64_t offset) const {
    const std::string what = "tensor " + quoted(tensor.name);
    if (offset % file_.alignment_ != 0) {
      fail(what, ": offset ", offset, " must be a multiple of the alignment ", file_.alignment_);
    }
    if (offset > left() || tensor.bytes > left() - offset) {
      fail(what, ": offset ", offset, " and size ", tensor.bytes, " lie outside the ", left(),
           " bytes of tensor data in the file's ", size_);
    }
    tensor.data = begin_ + position_ + offset;
  }

  const char* begin_;
  std::size_t size_;
  std::size_t position_ = 0;
  std::string file_name_;
  std::unordered_set<std::string_view> keys_;
  std::unordered_set<std::string_view> tensor_names_;
  File file_;
};

File File::parse(const void* bytes, std::size_t size, const std::string& name) {
  return Parser(bytes, size, name).parse();
}

File File::open(const std::string& path) {
  const auto fail = [&path](const char* what) {
    throw Error(path + ": " + what + ": " + std::strerror(errno));
  };
  // Closed on every way out; the mapping stays valid without it.
  struct Descriptor {
    int value;
    ~Descriptor() {
      if (value >= 0) ::close(value);
    }
  };
  const Descriptor descriptor{::open(path.c_str(), O_RDONLY | O_CLOEXEC)};
  if (descriptor.value < 0) fail("cannot open");
  struct stat status;
  if (::fstat(descriptor.value, &status) != 0) fail("cannot stat");
  if (!S_ISREG(status.st_mode)) throw Error(path + ": not a regular file");
  const auto size = static_cast<std::size_t>(status.st_size);
  if (size == 0) return parse("", 0, path);  // An empty file can't be mapped; parse says why.
  void* const base = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, descriptor.value, 0);
  if (base == MAP_FAILED) fail("cannot map");
  const std::shared_ptr<const void> mapping(
      base, [size](const void* address) { ::munmap(const_cast<void*>(address), size); });
  File file = parse(base, size, path);
  file.mapping_ = mapping;
  return file;
}

}  // namespace gguf
