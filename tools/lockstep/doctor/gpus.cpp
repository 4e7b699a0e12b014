#include "doctor/gpus.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <sstream>

#include <fmt/format.h>

#include "doctor/machine.h"
#include "run/child_process.h"

namespace lockstep::tool {
namespace {

namespace fs = std::filesystem;

std::string trimmed(const std::string& text) {
  const auto first = text.find_first_not_of(" \t\r");
  if (first == std::string::npos) return "";
  return text.substr(first, text.find_last_not_of(" \t\r") - first + 1);
}

std::vector<std::string> split_trimmed(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(trimmed(part));
  return parts;
}

std::string find_in_path(const std::string& name, const Environment::Lookup& lookup) {
  for (const auto& folder : split_trimmed(lookup("PATH").value_or("/usr/bin:/bin"), ':')) {
    const std::string program = fmt::format("{}/{}", folder.empty() ? "." : folder, name);
    if (::access(program.c_str(), X_OK) == 0) return program;
  }
  return "";
}

/// Parses "143771 MiB"; returns 0 for "[N/A]", which GPUs without dedicated memory report.
uint64_t bytes_of(const std::string& written) {
  const auto number = written.find(" MiB");
  return number == std::string::npos ? 0 : to_integer(written.substr(0, number)).value_or(0) << 20;
}

/// None for lines that are not a row of the table, such as messages.
std::optional<InstalledGpu> parse_row(const std::string& line) {
  const auto columns = split_trimmed(line, ',');
  const auto index = columns.size() == 6 ? to_integer(columns[0]) : std::nullopt;
  if (!index) return std::nullopt;
  return InstalledGpu{static_cast<int>(*index), {columns[1], bytes_of(columns[3])}, columns[2], columns[4], columns[5]};
}

void run_smi(const std::string& program, std::chrono::milliseconds limit, Gpus& gpus) {
  const auto ran = run_program(
      {program, "--query-gpu=index,name,pci.bus_id,memory.total,driver_version,compute_mode", "--format=csv,noheader"},
      limit);
  std::string message;  // nvidia-smi prints errors to stdout; the first line has the message
  for (const auto& line : split_trimmed(ran.output, '\n'))
    if (auto gpu = parse_row(line))
      gpus.installed.push_back(*gpu);
    else if (message.empty())
      message = line;
  gpus.smi_failure = ran.failure;
  if (!message.empty()) gpus.smi_failure += fmt::format("{}: {}", ran.failure.empty() ? "printed" : "", message);
  if (gpus.installed.empty() && gpus.smi_failure.empty()) gpus.smi_failure = "lists no GPU";
}

bool is_gpu(const std::string& name) {
  return name.size() > 6 && name.starts_with("nvidia") &&
         std::all_of(name.begin() + 6, name.end(), [](unsigned char c) { return std::isdigit(c) != 0; });
}

}  // namespace

Gpus read_gpus(const Environment::Lookup& lookup, std::chrono::milliseconds limit, const fs::path& root) {
  Gpus gpus;
  std::error_code missing;
  gpus.has_driver = fs::exists(root / "proc/driver/nvidia/version", missing);
  for (const auto& entry : fs::directory_iterator(root / "dev", missing))
    gpus.device_files += is_gpu(entry.path().filename()) ? 1 : 0;
  for ([[maybe_unused]] const auto& entry : fs::directory_iterator(root / "proc/driver/nvidia/gpus", missing))
    ++gpus.on_host;
  const std::string smi = find_in_path("nvidia-smi", lookup);
  gpus.has_smi = !smi.empty();
  if (gpus.has_smi) run_smi(smi, limit, gpus);
  gpus.visible_devices = lookup("CUDA_VISIBLE_DEVICES");
  return gpus;
}

VisibleGpus visible_gpus(const Gpus& gpus) {
  if (!gpus.visible_devices) return {gpus.installed, std::nullopt};
  VisibleGpus visible;
  for (const auto& entry : split_trimmed(*gpus.visible_devices, ',')) {
    const auto index = to_integer(entry);
    const auto found = std::find_if(gpus.installed.begin(), gpus.installed.end(), [&](const InstalledGpu& gpu) {
      return index && static_cast<uint64_t>(gpu.index) == *index;
    });
    if (found != gpus.installed.end()) {
      visible.gpus.push_back(*found);
    } else if (entry.starts_with("GPU-") || entry.starts_with("MIG-")) {
      visible.gpus.push_back({.index = -1, .gpu = {entry}});
    } else {
      visible.invalid_entry = entry;
      break;
    }
  }
  return visible;
}

}  // namespace lockstep::tool
