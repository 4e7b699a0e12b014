#pragma once

#include <string>

// The folder live/ of a training run. Ranks and launchers write small files there, which describe the current state of
// the run (docs/file_formats.md). A run must continue if they cannot be written: no function here throws.

namespace lockstep {

/// The variable with the path of a file, in a folder that only this user can write to. A rank writes the folder of its
/// run there, for the launcher.
inline constexpr const char* kRunNoteVariable = "LOCKSTEP_RUN_NOTE";
inline constexpr int kLiveFormat = 1;

std::string live_folder(const std::string& run_folder);
/// "rank-00003.json", "node-000.json", "output-00003.log".
std::string live_rank_file(int rank);
std::string live_node_file(int node);
std::string live_output_file(int rank);

/// Creates the folder if it is missing. Returns why that failed, or an empty string.
std::string make_live_folder(const std::string& folder);

/// Writes a file under another name and renames it, so that readers never see a part of it. Does not flush it to disk:
/// the file is worth nothing after a crash of the host. Returns why that failed, or an empty string.
std::string replace_live_file(const std::string& folder, const std::string& name, const std::string& content);
/// Adds to the end of an existing file. Returns why that failed, or an empty string; then a part may have been added.
std::string append_live_file(const std::string& folder, const std::string& name, const std::string& content);

/// How many ranks and nodes take part. Files of other ranks and nodes are left from an earlier start.
struct LiveParticipants {
  int ranks = 0;    // of rank-NNNNN.json
  int outputs = 0;  // of output-NNNNN.log
  int nodes = 0;    // of node-NNN.json
};
void remove_stale_live_files(const std::string& folder, const LiveParticipants& participants);

/// Unix time in seconds, with a fraction.
double unix_time();

}  // namespace lockstep
