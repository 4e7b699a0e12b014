#include "rendezvous/failure.h"

#include <algorithm>
#include <array>

#include "base/error.h"
#include "rendezvous/store/protocol.h"

namespace lockstep {

namespace {

// In the order of CulpritRole.
constexpr std::array kRoleNames{"gone", "silent", "exited", "gave up", "left", "late", "differs"};
static_assert(kRoleNames.size() == static_cast<size_t>(CulpritRole::kDiffers) + 1);

// Other ranks act on these two kinds only.
ErrorKind kind_for_peers(ErrorKind kind) {
  return kind == ErrorKind::kTimeout || kind == ErrorKind::kMismatch ? kind : ErrorKind::kPeer;
}

Culprit read_culprit(const std::string& rank, const std::string& role) {
  const auto found = std::find(kRoleNames.begin(), kRoleNames.end(), role);
  if (found == kRoleNames.end()) throw ProtocolError("a failure has an unknown role");
  return {static_cast<int>(to_number(rank)), static_cast<CulpritRole>(found - kRoleNames.begin())};
}

}  // namespace

std::vector<std::string> to_fields(const Failure& failure) {
  std::vector<std::string> fields{name_of(failure.kind), failure.message};
  if (!failure.culprit && !failure.reporter) return fields;
  fields.push_back(failure.culprit ? std::to_string(failure.culprit->rank) : "");
  fields.push_back(failure.culprit ? kRoleNames[static_cast<size_t>(failure.culprit->role)] : "");
  fields.push_back(failure.reporter ? std::to_string(*failure.reporter) : "");
  return fields;
}

Failure read_failure(const std::vector<std::string>& fields, size_t first) {
  if (fields.size() < first + 2) throw ProtocolError("a failure has too few fields");
  Failure failure{kind_for_peers(parse_error_kind(fields[first]).value_or(ErrorKind::kPeer)), fields[first + 1]};
  if (fields.size() < first + 5) return failure;
  const std::string &rank = fields[first + 2], &role = fields[first + 3], &reporter = fields[first + 4];
  if (!rank.empty()) failure.culprit = read_culprit(rank, role);
  if (!reporter.empty()) failure.reporter = static_cast<int>(to_number(reporter));
  return failure;
}

std::exception_ptr to_exception(const Failure& failure) {
  try {
    throw_error(kind_for_peers(failure.kind), failure.message, failure.reporter, failure.culprit);
  } catch (...) {
    return std::current_exception();
  }
}

Failure to_failure(const std::exception_ptr& error) {
  return {kind_for_peers(kind_of(error)), message_of(error), culprit_of(error)};
}

}  // namespace lockstep
