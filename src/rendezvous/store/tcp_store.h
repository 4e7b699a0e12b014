#pragma once

#include <memory>

#include <lockstep/store.h>

#include "rendezvous/store/store_client.h"

namespace lockstep {

/// Returns a Store whose operations are requests over `client`.
std::shared_ptr<Store> make_remote_store(std::shared_ptr<StoreClient> client);

}  // namespace lockstep
