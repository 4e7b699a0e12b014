# Reads the includes of every source and fails when a room includes what it must not know: docs/architecture.md has the
# table. With EXPECTED_VIOLATIONS it instead fails unless it finds exactly so many, which proves that it can.

cmake_minimum_required(VERSION 3.25)

set(rooms base rendezvous backends comm checkpoint parallel compiled data optim report launch)

# The rooms whose files each room may include, itself aside, as "src/" and as public headers.
set(base_may "")
set(rendezvous_may base)
set(backends_may base rendezvous)
set(comm_may base rendezvous backends)
set(parallel_may base comm checkpoint)
set(compiled_may base comm checkpoint parallel)
set(checkpoint_may base comm)
set(data_may base comm checkpoint)
set(optim_may base comm checkpoint parallel)
set(report_may base comm checkpoint)
set(launch_may base rendezvous)

# The rooms that never see torch, and what comm may see of it: tensors.
set(never_torch base rendezvous launch)
set(never_modules backends comm)

# The headers in include/lockstep of each room.
set(base_headers environment error export logging version)
set(rendezvous_headers rendezvous store tcp_store)
set(launch_headers launch_options launcher)
set(backends_headers backend reduce_op)
set(comm_headers
  call_options detail/tensor_members group_layout join process_group run_threads spawn tensors_in work)
set(parallel_headers
  accumulate autocast captured_step comm_hook data_parallel ddp_logging_data ddp_options detail/ddp_state
  detail/placed_arguments distributed_data_parallel fast_convolutions model_adapters recompute seed sync_batch_norm)
set(compiled_headers compiled_module)
set(optim_headers
  detail/fused_state detail/inner_optimizer fused_optimizers grad_scaler gradient_tools lr_scheduler optimizer_state
  parameter_groups schedules weight_average zero_redundancy_optimizer)
set(report_headers
  detail/training_run_inl early_stopping metric_log metrics print progress tensorboard_writer training_run)
set(data_headers
  batch_iterator batch_traits collate data_loader detail/batch_traits_inl detail/data_loader_inl detail/dataset_reading
  detail/group_loader_inl detail/group_reading detail/loaded_batch detail/loader_core detail/stream_core
  detail/stream_loader_inl detail/stream_reader distributed_sampler group_loader idx lmdb sample_order stage
  stream_loader subset)
set(checkpoint_headers
  checkpoint_directory checkpoint_file metric_mode module_state preemption_guard safetensors state_traits training_state value)

function(violation file include why)
  message("layering: ${file} includes ${include}: ${why}")
  set_property(GLOBAL APPEND PROPERTY violations ${file})
endfunction()

# The room that a file "room/x.h" or a public header "lockstep/x.h" belongs to; empty for others.
function(room_of include result)
  set(${result} "" PARENT_SCOPE)
  string(REGEX REPLACE "^([a-z]+)/.*$" "\\1" folder ${include})
  if(folder IN_LIST rooms)
    set(${result} ${folder} PARENT_SCOPE)
  endif()
  string(REGEX REPLACE "^lockstep/(.+)\\.h$" "\\1" header ${include})
  foreach(room ${rooms})
    if(header IN_LIST ${room}_headers)
      set(${result} ${room} PARENT_SCOPE)
    endif()
  endforeach()
endfunction()

function(check_include file room include)
  room_of(${include} other)
  if(other AND NOT other STREQUAL room AND NOT other IN_LIST ${room}_may)
    violation(${file} ${include} "${room} must not know ${other}")
  elseif(room STREQUAL "parallel" AND other STREQUAL "checkpoint" AND NOT include STREQUAL "lockstep/value.h")
    violation(${file} ${include} "parallel knows values, but no files")
  elseif(include STREQUAL "lockstep/lockstep.h")
    violation(${file} ${include} "the umbrella is for users")
  elseif(include MATCHES "^lockstep/" AND NOT other)
    violation(${file} ${include} "no room owns this header; add it to tests/layering.cmake")
  elseif(include STREQUAL "mpi.h" AND NOT file MATCHES "/src/backends/mpi/")
    violation(${file} ${include} "MPI stays in src/backends/mpi")
  elseif(include MATCHES "^(nccl|cuda.*)\\.h$|^(ATen|c10)/cuda/" AND NOT file MATCHES "/src/backends/nccl/")
    violation(${file} ${include} "CUDA stays in src/backends/nccl")
  elseif(include MATCHES "^(torch|ATen|c10)/" AND room IN_LIST never_torch)
    violation(${file} ${include} "${room} never sees torch")
  elseif(include MATCHES "^torch/" AND NOT include MATCHES "^torch/(version|csrc/jit/serialization/pickle)\\.h$" AND
         room IN_LIST never_modules)
    violation(${file} ${include} "${room} knows tensors, not modules or autograd")
  endif()
endfunction()

function(includes_of file result)
  file(STRINGS ${file} lines REGEX "^[ \t]*#[ \t]*include")
  list(TRANSFORM lines REPLACE "^[ \t]*#[ \t]*include[ \t]*[<\"]([^>\"]+)[>\"].*$" "\\1")
  set(${result} "${lines}" PARENT_SCOPE)
endfunction()

foreach(room ${rooms})
  file(GLOB_RECURSE files ${SOURCE}/src/${room}/*.h ${SOURCE}/src/${room}/*.cpp ${SOURCE}/src/${room}/*.cu)
  foreach(header ${${room}_headers})
    if(EXISTS ${SOURCE}/include/lockstep/${header}.h)
      list(APPEND files ${SOURCE}/include/lockstep/${header}.h)
    endif()
  endforeach()
  foreach(file ${files})
    includes_of(${file} includes)
    foreach(include ${includes})
      check_include(${file} ${room} ${include})
    endforeach()
  endforeach()
endforeach()

# Tools, examples, benchmarks and the umbrella know nothing private.
file(GLOB_RECURSE outside ${SOURCE}/examples/*.cpp ${SOURCE}/benchmarks/*.cpp ${SOURCE}/tools/*.cpp ${SOURCE}/tools/*.h
  ${SOURCE}/include/lockstep/lockstep.h)
foreach(file ${outside})
  includes_of(${file} includes)
  foreach(include ${includes})
    room_of(${include} room)
    if(file MATCHES "/tools/lockstep/" AND EXISTS ${SOURCE}/tools/lockstep/${include} AND
       NOT EXISTS ${SOURCE}/src/${include})
      set(room "")  # a folder of the command line with the name of a room: checkpoint
    endif()
    if(include MATCHES "^lockstep/detail/")
      violation(${file} ${include} "include/lockstep/detail is for other headers")
    endif()
    # The command line is part of the product and links base: it reads the machine with the launcher's own code.
    if(room AND NOT include MATCHES "^lockstep/" AND NOT (room STREQUAL "base" AND file MATCHES "/tools/lockstep/"))
      violation(${file} ${include} "only include/lockstep is for programs")
    endif()
  endforeach()
endforeach()

# Only one header depends on the version of LibTorch.
file(GLOB_RECURSE sources ${SOURCE}/include/*.h ${SOURCE}/src/*.h ${SOURCE}/src/*.cpp ${SOURCE}/tests/*.h ${SOURCE}/tests/*.cpp)
list(FILTER sources EXCLUDE REGEX "^${SOURCE}/(src/comm/torch_version\\.h$|tests/layering_violations/)")
foreach(file ${sources} ${outside})
  file(STRINGS ${file} lines REGEX "^[ \t]*#[ \t]*(el)?if.*(TORCH_VERSION|LOCKSTEP_TORCH_AT_LEAST)")
  if(lines)
    violation(${file} "an #if on the version of LibTorch" "differences between versions belong in src/comm/torch_version.h")
  endif()
endforeach()

# Some wheels of PyTorch export functions of std::filesystem that crash.
file(GLOB_RECURSE sources ${SOURCE}/src/*.cpp ${SOURCE}/tests/*.h ${SOURCE}/tests/*.cpp)
list(FILTER sources EXCLUDE REGEX "^${SOURCE}/tests/layering_violations/")
foreach(file ${sources} ${outside})
  file(STRINGS ${file} lines REGEX "(std::filesystem|fs)::remove_all\\(")
  if(lines)
    violation(${file} "std::filesystem::remove_all" "it crashes with PyTorch's wheel; tests use remove_folder()")
  endif()
endforeach()

get_property(violations GLOBAL PROPERTY violations)
list(LENGTH violations count)
if(DEFINED EXPECTED_VIOLATIONS)
  if(NOT count EQUAL EXPECTED_VIOLATIONS)
    message(FATAL_ERROR "found ${count} violations, not ${EXPECTED_VIOLATIONS}")
  endif()
elseif(count GREATER 0)
  message(FATAL_ERROR "${count} violations of the layering in docs/architecture.md")
endif()
