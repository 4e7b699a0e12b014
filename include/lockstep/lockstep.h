#pragma once

#include <torch/torch.h>

#include <lockstep/backend.h>
#include <lockstep/bucket_plan.h>
#include <lockstep/call_options.h>
#include <lockstep/comm_hook.h>
#include <lockstep/ddp_logging_data.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/distributed_sampler.h>
#include <lockstep/environment.h>
#include <lockstep/error.h>
#include <lockstep/group_layout.h>
#include <lockstep/idx.h>
#include <lockstep/join.h>
#include <lockstep/logging.h>
#include <lockstep/meeting_place.h>
#include <lockstep/process_group.h>
#include <lockstep/reduce_op.h>
#include <lockstep/run_threads.h>
#include <lockstep/spawn.h>
#include <lockstep/store.h>
#include <lockstep/tcp_store.h>
#include <lockstep/tensors_in.h>
#include <lockstep/torch_version.h>
#include <lockstep/version.h>
#include <lockstep/work.h>
