# Sourced by ./quickstart and ./test: finds out what is missing on this machine and installs it with apt.

say() { printf '\033[1m%s\033[0m\n' "$*"; }
[ -t 1 ] && [ -z "${NO_COLOR:-}" ] || say() { printf '%s\n' "$*"; }

has_command() { command -v "$1" >/dev/null 2>&1; }
has_header() { printf '#include <%s>\n' "$1" | c++ -std=c++20 -E -x c++ - >/dev/null 2>&1; }
wheel_torch() { "$1" -c 'import torch, os; assert os.path.isdir(torch.utils.cmake_prefix_path)' 2>/dev/null; }
has_libtorch() {
  local folder
  [ -e "${Torch_DIR:-}/TorchConfig.cmake" ] && return
  for folder in $(tr ':;' '  ' <<<"${CMAKE_PREFIX_PATH:-}"); do
    [ -e "$folder/share/cmake/Torch/TorchConfig.cmake" ] && return
  done
  has_header torch/csrc/api/include/torch/version.h || wheel_torch python3 || wheel_torch /usr/bin/python3
}
has_python_torch() { python3 -c 'import torch' 2>/dev/null || /usr/bin/python3 -c 'import torch' 2>/dev/null; }
has_python_lmdb() { python3 -c 'import lmdb' 2>/dev/null || /usr/bin/python3 -c 'import lmdb' 2>/dev/null; }
has_mpi() { has_command mpirun && has_command mpicxx; }
has_fashion_mnist() {
  [ -e /usr/share/datasets/fashion-mnist ] || [ -n "${LOCKSTEP_DATA:-}" ]
}

# need WHAT PACKAGES CHECK...: without it nothing can be built. want: the same for what we can do without.
required=() required_packages=() optional=() optional_packages=()
need() { local what=$1 debs=$2; shift 2; "$@" || { required+=("$what"); required_packages+=($debs); }; }
want() { local what=$1 debs=$2; shift 2; "$@" || { optional+=("$what"); optional_packages+=($debs); }; }
listed() { printf '%s, ' "$@" | sed 's/, $//'; }

# For building the library at all.
need_library() {
  need 'a C++ compiler' 'g++' has_command c++
  need CMake cmake has_command cmake
  need Ninja ninja-build has_command ninja
  need LibTorch 'libtorch-dev libopenblas0-pthread' has_libtorch
  need spdlog 'libspdlog-dev libfmt-dev' has_header spdlog/spdlog.h
  need OpenSSL libssl-dev has_header openssl/ssl.h
  need zlib zlib1g-dev has_header zlib.h
  need CLI11 libcli11-dev has_header CLI/CLI.hpp
  need nlohmann-json nlohmann-json3-dev has_header nlohmann/json.hpp
  want 'Gloo (ranks as processes)' libgloo-dev has_header gloo/context.h
  want 'Open MPI (mpirun)' 'openmpi-bin libopenmpi-dev' has_mpi
  want 'LMDB (datasets)' liblmdb-dev has_header lmdb.h
  want 'ccache (faster second builds)' ccache has_command ccache
}

as_root() { if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi; }
apt_install() { as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@"; }

# Installs what is missing, if it can; goes on when only optional parts stay missing.
install_missing() {
  [ $((${#required[@]} + ${#optional[@]})) -gt 0 ] || { say 'All parts are installed.'; return; }
  say "Missing on this machine: $(listed "${required[@]}" "${optional[@]}")"
  if has_command apt-get && { [ "$(id -u)" -eq 0 ] || has_command sudo; }; then
    say "Installing with apt-get: ${required_packages[*]} ${optional_packages[*]}"
    as_root apt-get update -qq || true
    if apt_install "${required_packages[@]}" "${optional_packages[@]}"; then return; fi
    # A package that this release does not have must not keep the others out.
    [ ${#required[@]} -eq 0 ] || { apt_install "${required_packages[@]}" && required=(); }
    say 'apt-get could not install all of them.'
  else
    say 'They cannot be installed here: there is no apt-get, or no right to use it.'
  fi
  if [ ${#required[@]} -gt 0 ]; then
    say "lockstep cannot be built without: $(listed "${required[@]}")"
    exit 1
  fi
  say 'Going on with what there is.'
}

# configure TESTS: the release build in build/, with or without tests.
configure() {
  say 'Configuring (build/)'
  local log
  log=$(mktemp)
  cmake --preset release -DLOCKSTEP_TESTS="$1" -Wno-dev >"$log" 2>&1 || {
    cat "$log"
    rm -f "$log"
    exit 1
  }
  sed -n '/^-- lockstep /,/^$/p' "$log"
  rm -f "$log"
}
