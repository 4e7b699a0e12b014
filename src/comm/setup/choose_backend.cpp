#include "comm/setup/choose_backend.h"

#include <algorithm>
#include <set>

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep::detail {

std::vector<std::string> choose_backends(const std::vector<std::string>& host_of_rank,
                                         const std::vector<std::string>& available) {
  if (host_of_rank.size() == 1) return {"threads"};
  const size_t hosts = std::set<std::string>(host_of_rank.begin(), host_of_rank.end()).size();
  std::vector<std::string> choice;
  if (hosts == 1) {
    choice = {"shm", "gloo"};
  } else if (hosts < host_of_rank.size()) {
    choice = {"hierarchical", "gloo"};
  } else {
    choice = {"gloo"};
  }
  std::erase_if(choice, [&](const std::string& name) {
    return std::find(available.begin(), available.end(), name) == available.end();
  });
  if (choice.empty())
    throw UsageError(text("the ranks are on ", hosts, " hosts, and this build has no backend between hosts (it has ",
                          enumerate(available), "); install libgloo-dev and build again"));
  return choice;
}

}  // namespace lockstep::detail
