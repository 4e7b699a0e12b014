#pragma once

#include <string>

#include <lockstep/rendezvous.h>

namespace lockstep {

/// Returns a name that is the same on all ranks of a job and differs between jobs: the first that is set and not empty
/// of LOCKSTEP_JOB_ID, TORCHELASTIC_RUN_ID, PMIX_NAMESPACE, OMPI_MCA_ess_base_jobid, and SLURM_JOB_ID with
/// SLURM_STEP_ID. Empty if none is set.
std::string job_name(const Environment::Lookup& lookup);

/// Returns a port from 20000 to 29999 derived from the job's name, the same on all ranks; kDefaultPort without a name.
int job_port(const Environment::Lookup& lookup);

/// Returns how often the job was restarted: LOCKSTEP_RESTART_COUNT, else TORCHELASTIC_RESTART_COUNT, else 0.
int restart_count(const Environment::Lookup& lookup);

}  // namespace lockstep
