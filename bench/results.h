#pragma once

/// Rows of bench/results/<machine>.csv: `layer,N,K,G,M,impl,us,tops,gbps,commit`.

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace bench {

inline constexpr const char* kHeader = "layer,N,K,G,M,impl,us,tops,gbps,commit";

/// A measurement. `key` is the first six columns, `values` the others.
struct Row {
  std::string key;
  std::string values;
};

/// Takes `--name=value` out of the arguments; `otherwise` if it is not there.
inline std::string take_flag(int& argc, char** argv, const std::string& name,
                             const std::string& otherwise) {
  const std::string flag = "--" + name + "=";
  std::string value = otherwise;
  int kept = 0;
  for (int i = 0; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument.rfind(flag, 0) == 0) {
      value = argument.substr(flag.size());
    } else {
      argv[kept++] = argv[i];
    }
  }
  argc = kept;
  return value;
}

inline std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::size_t begin = 0;
  for (;;) {
    const std::size_t end = text.find(separator, begin);
    parts.push_back(text.substr(begin, end == std::string::npos ? end : end - begin));
    if (end == std::string::npos) return parts;
    begin = end + 1;
  }
}

/// "NVIDIA H200" -> "h200", "NVIDIA GeForce RTX 4090" -> "geforce-rtx-4090".
inline std::string machine_name(std::string device) {
  const std::string vendor = "NVIDIA ";
  if (device.rfind(vendor, 0) == 0) device.erase(0, vendor.size());
  std::string name;
  for (const char c : device) {
    if (std::isalnum(static_cast<unsigned char>(c)) != 0) {
      name += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    } else if (!name.empty() && name.back() != '-') {
      name += '-';
    }
  }
  while (!name.empty() && name.back() == '-') name.pop_back();
  return name.empty() ? "gpu" : name;
}

/// The rows of a file, or none if there is no such file.
inline std::vector<Row> read_results(const std::string& path) {
  std::vector<Row> rows;
  std::ifstream file(path);
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    if (line.empty() || line == kHeader) continue;
    std::size_t comma = 0;
    for (int column = 0; column < 6 && comma != std::string::npos; ++column) {
      comma = line.find(',', column == 0 ? 0 : comma + 1);
    }
    if (comma == std::string::npos) {
      throw std::runtime_error(path + ":" + std::to_string(number) + ": not a row of " + kHeader);
    }
    rows.push_back({line.substr(0, comma), line.substr(comma + 1)});
  }
  return rows;
}

/// Orders rows by layer and impl as the lists have them (others last), by K, N, G and M as numbers.
class RowOrder {
 public:
  RowOrder(std::vector<std::string> layers, std::vector<std::string> impls)
      : layers_(std::move(layers)), impls_(std::move(impls)) {}

  bool operator()(const Row& a, const Row& b) const { return rank(a) < rank(b); }

 private:
  static std::int64_t index(const std::vector<std::string>& names, const std::string& name) {
    return std::find(names.begin(), names.end(), name) - names.begin();
  }

  std::vector<std::int64_t> rank(const Row& row) const {
    const std::vector<std::string> columns = split(row.key, ',');
    return {index(layers_, columns[0]), std::stoll(columns[3]), std::stoll(columns[4]),
            index(impls_, columns[5])};
  }

  std::vector<std::string> layers_;
  std::vector<std::string> impls_;
};

/// Writes `rows` over those of the same key in the file and keeps its others.
inline void merge_results(const std::string& path, const std::vector<Row>& rows,
                          const RowOrder& order) {
  std::vector<Row> merged = read_results(path);
  for (const Row& row : rows) {
    const auto same = std::find_if(merged.begin(), merged.end(),
                                   [&](const Row& other) { return other.key == row.key; });
    if (same != merged.end()) {
      *same = row;
    } else {
      merged.push_back(row);
    }
  }
  std::stable_sort(merged.begin(), merged.end(), order);
  // A new file takes the old one's place at once, so that a run cut short loses nothing.
  const std::string partial = path + ".partial";
  std::ofstream file(partial);
  file << kHeader << '\n';
  for (const Row& row : merged) file << row.key << ',' << row.values << '\n';
  file.close();
  if (!file || std::rename(partial.c_str(), path.c_str()) != 0) {
    throw std::runtime_error("cannot write " + path);
  }
}

}  // namespace bench
