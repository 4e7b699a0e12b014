#include "doctor/judge_nccl.h"

#include <algorithm>
#include <sstream>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "doctor/files.h"

namespace lockstep::tool {
namespace {

/// Whether NCCL_SOCKET_IFNAME lets NCCL use the interface: "eth,ib" are beginnings of names, "=eth0" whole ones, and a
/// "^" before all of them means the others.
bool allows(std::string pattern, const std::string& name) {
  const bool excludes = pattern.starts_with('^');
  if (excludes) pattern.erase(0, 1);
  const bool is_exact = pattern.starts_with('=');
  if (is_exact) pattern.erase(0, 1);
  std::istringstream entries(pattern);
  for (std::string entry; std::getline(entries, entry, ',');) {
    const std::string wanted = entry.substr(0, entry.find(':'));  // a port may follow
    if (!wanted.empty() && (is_exact ? name == wanted : name.starts_with(wanted))) return !excludes;
  }
  return excludes;
}

bool can_be_used(const Interface& interface) {
  return interface.is_up && !interface.addresses.empty();
}

}  // namespace

Finding judge_nccl(const Probe& probe) {
  if (has_backend(probe, "nccl"))
    return {"NCCL", Status::kOk, fmt::format("{}, for CUDA {}", probe.nccl_version, probe.cuda_version)};
  if (!probe.has_cuda)
    return {"NCCL", Status::kWarning, "not in this build, whose LibTorch is for CPUs: ranks train on the CPU",
            "install a CUDA build of PyTorch or LibTorch; then build lockstep again, with CMAKE_PREFIX_PATH set to it"};
  return {
      "NCCL", Status::kWarning, "not in this build: ranks train on the CPU",
      fmt::format("apt-get install libnccl-dev, and CUDA {}'s headers; then build lockstep again", probe.cuda_version)};
}

Finding judge_nccl_interface(const std::string& named, const Network& network, bool beyond_this_host) {
  constexpr const char* kCheck = "NCCL's network";
  const std::string found = fmt::format("NCCL_SOCKET_IFNAME is \"{}\"", named);
  const std::string remedy = "unset it, or name the interface that the other hosts reach";
  const auto& all = network.interfaces;
  // The first is where NCCL's ranks meet. A list of exclusions alone does not keep it from lo.
  const auto first = std::find_if(all.begin(), all.end(),
                                  [&](const Interface& one) { return can_be_used(one) && allows(named, one.name); });
  if (first == all.end()) {
    std::vector<std::string> names;
    for (const auto& one : all)
      if (can_be_used(one)) names.push_back(one.name);
    return {kCheck, Status::kError, fmt::format("{}, and the interfaces here are {}", found, fmt::join(names, ", ")),
            remedy};
  }
  if (beyond_this_host && is_loopback({.addresses = first->addresses}))
    return {kCheck, Status::kError,
            fmt::format("{}, which lets NCCL take {}: no other host reaches it", found, first->name),
            named.starts_with('^') ? fmt::format("NCCL_SOCKET_IFNAME={},lo", named) : remedy};
  return {kCheck, Status::kOk, fmt::format("{}, by NCCL_SOCKET_IFNAME=\"{}\"", first->name, named)};
}

Finding judge_nccl_variables(const Variables& nccl, size_t gpus, bool has_infiniband) {
  if (nccl.empty()) return {"NCCL variables", Status::kOk, "none set"};
  std::vector<std::string> shown, slow;
  for (const auto& [name, value] : nccl) shown.push_back(fmt::format("{}={}", name, value));
  if (gpus > 1 && is_on(nccl, "NCCL_P2P_DISABLE")) slow.push_back("NCCL_P2P_DISABLE");
  if (has_infiniband && is_on(nccl, "NCCL_IB_DISABLE")) slow.push_back("NCCL_IB_DISABLE");
  const std::string found(fmt::format("{}", fmt::join(shown, ", ")));
  if (slow.empty()) return {"NCCL variables", Status::kOk, found};
  return {"NCCL variables", Status::kWarning, fmt::format("{}: data takes a slower way than this machine has", found),
          fmt::format("unset {}, unless it hangs without", fmt::join(slow, " "))};
}

bool is_on(const Variables& nccl, const std::string& name) {
  const auto found = nccl.find(name);
  return found != nccl.end() && to_integer(found->second).value_or(0) != 0;
}

}  // namespace lockstep::tool
