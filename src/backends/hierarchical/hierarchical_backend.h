#pragma once

#include <memory>

#include <lockstep/backend.h>

namespace lockstep {

/// Joins processes on several hosts: through shared memory inside each, through Gloo between them, so that the bytes of
/// a host cross the network once and not once for each of its ranks.
///
/// All-reduce: reduce-scatter inside each host, all-reduce between the ranks of equal index on all hosts, all-gather
/// inside: 2N(h-1)/h bytes leave each of h hosts. A large tensor goes in stretches, so that memory and network are busy
/// at the same time. Half and bfloat16 go as float32, so that a sum is rounded once.
std::unique_ptr<Backend> make_hierarchical_backend(const BackendContext& context);

}  // namespace lockstep
