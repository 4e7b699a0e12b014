#include "comm/watch/call_id.h"

#include "base/text.h"

namespace lockstep::detail {

std::string describe(const CallId& call_id) {
  if (call_id.message)
    return text("message ", call_id.number, " from rank ", call_id.message->from, " to rank ", call_id.message->to,
                " with tag ", call_id.message->tag);
  return text(call_id.aside ? name_of(*call_id.aside) : "call", ' ', call_id.number);
}

}  // namespace lockstep::detail
