# Sourced by ./quickstart and ./test: finds out what is missing on this machine and installs it with apt.

say() { printf '\033[1m%s\033[0m\n' "$*"; }
[ -t 1 ] && [ -z "${NO_COLOR:-}" ] || say() { printf '%s\n' "$*"; }

has_command() { command -v "$1" >/dev/null 2>&1; }
has_header() { printf '#include <%s>\n' "$1" | c++ -std=c++20 -E -x c++ - >/dev/null 2>&1; }
wheel_torch() { "$1" -c 'import torch, os; assert os.path.isdir(torch.utils.cmake_prefix_path)' 2>/dev/null; }
has_libtorch() {
  [ -n "${CMAKE_PREFIX_PATH:-}${Torch_DIR:-}" ] || has_header torch/version.h || has_header torch/csrc/api/include/torch/version.h ||
    wheel_torch python3 || wheel_torch /usr/bin/python3
}
has_python_torch() { python3 -c 'import torch' 2>/dev/null || /usr/bin/python3 -c 'import torch' 2>/dev/null; }
has_fashion_mnist() {
  [ -e /usr/share/datasets/fashion-mnist ] || [ -n "${LOCKSTEP_DATA:-}" ]
}

# need WHAT PACKAGES CHECK...: without it nothing can be built. want: the same for what we can do without.
required=() optional=() packages=()
need() { local what=$1 debs=$2; shift 2; "$@" || { required+=("$what"); packages+=($debs); }; }
want() { local what=$1 debs=$2; shift 2; "$@" || { optional+=("$what"); packages+=($debs); }; }

# For building the library at all.
need_library() {
  need 'a C++ compiler' 'g++' has_command c++
  need CMake cmake has_command cmake
  need Ninja ninja-build has_command ninja
  need LibTorch 'libtorch-dev libopenblas0-pthread' has_libtorch
  need spdlog 'libspdlog-dev libfmt-dev' has_header spdlog/spdlog.h
  need zlib zlib1g-dev has_header zlib.h
  want 'Gloo (ranks as processes)' libgloo-dev has_header gloo/context.h
  want 'ccache (faster second builds)' ccache has_command ccache
}

# Installs what is missing, if it can; without apt it goes on when only optional parts are missing.
install_missing() {
  [ ${#packages[@]} -gt 0 ] || { say 'All parts are installed.'; return; }
  say "Missing on this machine: $(printf '%s, ' "${required[@]}" "${optional[@]}" | sed 's/, $//')"
  local root=()
  [ "$(id -u)" -eq 0 ] || root=(sudo)
  if has_command apt-get && { [ "$(id -u)" -eq 0 ] || has_command sudo; }; then
    say "Installing with apt-get: ${packages[*]}"
    if "${root[@]}" apt-get update -qq &&
      "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${packages[@]}"; then
      return
    fi
    say 'apt-get could not install them.'
  else
    say 'They cannot be installed here: there is no apt-get, or no right to use it.'
  fi
  if [ ${#required[@]} -gt 0 ]; then
    say "lockstep cannot be built without: $(printf '%s, ' "${required[@]}" | sed 's/, $//')"
    exit 1
  fi
  say 'Going on without them.'
}

# configure TESTS: the release build in build/, with or without tests.
configure() {
  say 'Configuring (build/)'
  local log
  log=$(mktemp)
  cmake --preset release -DLOCKSTEP_TESTS="$1" -DLOCKSTEP_BENCHMARKS="$1" -Wno-dev >"$log" 2>&1 || {
    cat "$log"
    rm -f "$log"
    exit 1
  }
  sed -n '/^-- lockstep /,/^$/p' "$log"
  rm -f "$log"
}
