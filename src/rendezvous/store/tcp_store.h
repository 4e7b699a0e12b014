#pragma once

#include <memory>

#include <lockstep/store.h>

#include "rendezvous/store/store_client.h"

namespace lockstep {

/// The store at the other end of the line.
std::shared_ptr<Store> make_remote_store(std::shared_ptr<StoreClient> client);

}  // namespace lockstep
