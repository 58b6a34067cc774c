#pragma once

/// A reader of GGUF model files, versions 2 and 3.
///
/// The file is mapped, never copied: a tensor is a pointer into it. Everything that the reader
/// believes is checked against the file first, so that no byte of it can cause an access outside
/// the mapping or an allocation out of proportion to the file. What breaks a rule throws
/// gguf::Error.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace gguf {

/// A file that breaks a rule of the format. The message names the file, the values and the rule.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// ggml's number of the 1-bit type that binary_gemm::import_q1_0 takes.
inline constexpr std::uint32_t kTypeQ1_0 = 41;

/// ggml's limit on the dimensions of a tensor.
inline constexpr std::uint32_t kMaxDims = 4;

/// "Q1_0", "F32" ...; "type 99" for a number that this reader does not know.
std::string type_name(std::uint32_t type);

/// A string from a file as it may be shown on a terminal: bytes that are not printable ASCII as
/// \xNN, and at most 80 of them.
std::string printable(std::string_view value);

/// A tensor of the file. `data` lives as long as the File it came from.
struct Tensor {
  std::string name;
  std::uint32_t type = 0;          ///< ggml's number; see type_name.
  std::vector<std::int64_t> dims;  ///< In ggml's order: dims[0] runs fastest and is K.
  const void* data = nullptr;      ///< Aligned to the file's alignment, if the mapping is.
  std::size_t bytes = 0;           ///< 0 for an unknown type, whose size can't be told.

  std::int64_t k() const;  ///< dims[0]: elements of a row.
  std::int64_t n() const;  ///< Rows: the product of the other dimensions.
};

/// An open file. Copies share the mapping.
class File {
 public:
  /// Maps `path` read-only. The file must not be truncated by others while it is open.
  static File open(const std::string& path);

  /// Reads a file that lies in memory, which must outlive the File. `name` is for messages.
  static File parse(const void* bytes, std::size_t size, const std::string& name);

  std::uint32_t version() const { return version_; }
  std::uint32_t alignment() const { return alignment_; }
  std::uint64_t metadata_count() const { return metadata_count_; }
  std::size_t bytes() const { return bytes_; }

  /// The metadata general.architecture and general.name; empty if the file has none.
  const std::string& architecture() const { return architecture_; }
  const std::string& name() const { return name_; }

  const std::vector<Tensor>& tensors() const { return tensors_; }

 private:
  friend class Parser;

  std::shared_ptr<const void> mapping_;
  std::size_t bytes_ = 0;
  std::uint32_t version_ = 0;
  std::uint32_t alignment_ = 32;
  std::uint64_t metadata_count_ = 0;
  std::string architecture_;
  std::string name_;
  std::vector<Tensor> tensors_;
};

}  // namespace gguf
