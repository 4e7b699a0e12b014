#include "comm/watch/call_id.h"

#include "base/text.h"

namespace lockstep::detail {

std::string describe(const Subject& subject) {
  if (subject.message)
    return text("message ", subject.number, " from rank ", subject.message->from, " to rank ", subject.message->to,
                " with tag ", subject.message->tag);
  return text(subject.aside ? name_of(*subject.aside) : "call", ' ', subject.number);
}

}  // namespace lockstep::detail
