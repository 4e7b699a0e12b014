# Sourced by ./quickstart and ./test: finds out what is missing on this machine, installs it, chooses a LibTorch, and builds.

say() { printf '\033[1m%s\033[0m\n' "$*"; }
[ -t 1 ] && [ -z "${NO_COLOR:-}" ] || say() { printf '%s\n' "$*"; }

has_command() { command -v "$1" >/dev/null 2>&1; }
has_header() { printf '#if !__has_include(<%s>)\n#error\n#endif\n' "$1" | c++ -E -x c++ - >/dev/null 2>&1; }
has_module() {  # has_module NAME: a Python module, without loading it
  local python
  for python in python3 /usr/bin/python3; do
    "$python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$1') is None)" 2>/dev/null && return
  done
  return 1
}
has_mpi() { has_command mpirun && has_command mpicxx; }
has_fashion_mnist() { [ -e /usr/share/datasets/fashion-mnist ] || [ -n "${LOCKSTEP_DATA:-}" ]; }

# need WHAT PACKAGES CHECK...: without it nothing can be built. want: the same for what we can do without.
required=() required_packages=() optional=() optional_packages=() installed_any=no
need() { local what=$1 debs=$2; shift 2; "$@" || { required+=("$what"); required_packages+=($debs); }; }
want() { local what=$1 debs=$2; shift 2; "$@" || { optional+=("$what"); optional_packages+=($debs); }; }
listed() { printf '%s, ' "$@" | sed 's/, $//'; }

# For building the library at all.
need_library() {
  need 'a C++ compiler' 'g++' has_command c++
  need CMake cmake has_command cmake
  need Ninja ninja-build has_command ninja
  need spdlog 'libspdlog-dev libfmt-dev' has_header spdlog/spdlog.h
  need OpenSSL libssl-dev has_header openssl/ssl.h
  need zlib zlib1g-dev has_header zlib.h
  need CLI11 libcli11-dev has_header CLI/CLI.hpp
  need nlohmann-json nlohmann-json3-dev has_header nlohmann/json.hpp
  want 'Gloo (ranks on several hosts)' libgloo-dev has_header gloo/context.h
  want 'Open MPI (mpirun)' 'openmpi-bin libopenmpi-dev' has_mpi
  want 'LMDB (datasets)' liblmdb-dev has_header lmdb.h
  want 'ccache (faster second builds)' ccache has_command ccache
}

as_root() { if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi; }
can_install() { has_command apt-get && { [ "$(id -u)" -eq 0 ] || has_command sudo; }; }
# apt_install PACKAGES...: quietly; the end of its log is shown when it fails.
apt_install() {
  mkdir -p build
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@" >build/install.log 2>&1 ||
    { tail -n 10 build/install.log; say 'The whole log: build/install.log'; return 1; }
  installed_any=yes
}

# Installs what is missing, if it can; goes on when only optional parts stay missing.
install_missing() {
  [ $((${#required[@]} + ${#optional[@]})) -gt 0 ] || return 0
  say "Missing on this machine: $(listed "${required[@]}" "${optional[@]}")"
  if can_install; then
    say "Installing with apt-get: ${required_packages[*]} ${optional_packages[*]}"
    as_root apt-get update -qq 2>/dev/null || true
    # A package that this release does not have, or that cannot be reached, must not keep the others out.
    local package known=()
    for package in "${required_packages[@]}" "${optional_packages[@]}"; do
      apt-cache show "$package" >/dev/null 2>&1 && known+=("$package")
    done
    if [ ${#known[@]} -gt 0 ] && apt_install "${known[@]}"; then
      [ ${#known[@]} -eq $((${#required_packages[@]} + ${#optional_packages[@]})) ] && return
      [[ " ${known[*]} " == *" ${required_packages[*]} "* ]] && required=()
    fi
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

tensorboard_environment=${XDG_CACHE_HOME:-$HOME/.cache}/lockstep/tensorboard
# TensorBoard reads the event files that the tests write. Where PyPI cannot be reached, those tests are skipped and listed.
want_tensorboard() {
  local python
  [ -x "$tensorboard_environment/bin/tensorboard" ] && return
  for python in python3 /usr/bin/python3; do "$python" -c 'import venv, ensurepip' 2>/dev/null && break; done
  say "Installing TensorBoard with pip, into $tensorboard_environment"
  { "$python" -m venv "$tensorboard_environment" &&
    "$tensorboard_environment/bin/pip" install -q --disable-pip-version-check --retries 1 --timeout 15 tensorboard; } 2>/dev/null &&
    installed_any=yes || { rm -rf "$tensorboard_environment"; say 'It cannot be installed here.'; }
}

# --- LibTorch

torch_wheel=torch==2.11.0  # the version that lockstep is tested with
torch_environment=${XDG_CACHE_HOME:-$HOME/.cache}/lockstep/torch

torches() { cmake -P cmake/LockstepFindTorch.cmake; }  # lines of: version, folder of TorchConfig.cmake
# torch_in PATH: the LibTorch in an unpacked archive, a prefix, or a Python environment.
torch_in() {
  local folder
  for folder in "$1" "$1/Torch" "$1"/share/cmake/Torch "$1"/lib/*/cmake/Torch \
    "$1"/lib/python3*/{site,dist}-packages/torch/share/cmake/Torch; do
    [ -e "$folder/TorchConfig.cmake" ] && { (cd "$folder" && pwd); return; }
  done
  return 1
}

install_torch_debian() {
  can_install || return 1
  say 'Installing LibTorch with apt-get: libtorch-dev'
  as_root apt-get update -qq || true
  apt_install libtorch-dev libopenblas0-pthread
}

# PyTorch's wheel, in an environment of its own that all checkouts share: on x86-64 it takes gigabytes.
install_torch_wheel() {
  local python
  for python in python3 /usr/bin/python3; do "$python" -c 'import venv, ensurepip' 2>/dev/null && break; done
  "$python" -c 'import venv, ensurepip' 2>/dev/null ||
    { can_install && { as_root apt-get update -qq || true; } && apt_install python3-venv && python=/usr/bin/python3; } || return 1
  say "Installing PyTorch's wheel with pip: $torch_wheel, into $torch_environment"
  "$python" -m venv "$torch_environment" &&
    "$torch_environment/bin/pip" install -q --disable-pip-version-check "$torch_wheel" numpy && installed_any=yes ||
    { rm -rf "$torch_environment"; return 1; }
}

# choose_torch HOW: sets torch to the folder of TorchConfig.cmake. HOW is debian, wheel, a path, or nothing: what is
# installed, in the order of cmake/LockstepFindTorch.cmake.
choose_torch() {
  case $1 in
    debian)
      torch=$(torch_in /usr) || { install_torch_debian && torch=$(torch_in /usr); } ||
        { say "Debian's LibTorch cannot be installed here."; exit 1; } ;;
    wheel)
      torch=$(torch_in "$torch_environment") || { install_torch_wheel && torch=$(torch_in "$torch_environment"); } ||
        { say "PyTorch's wheel cannot be installed here."; exit 1; } ;;
    ?*)
      torch=$(torch_in "$1") || { say "--torch $1: there is no TorchConfig.cmake in it."; exit 1; } ;;
    *)
      torch=$(torches | sed -n '1s/^[^ ]* //p')
      [ -n "$torch" ] || install_torch_debian || install_torch_wheel ||
        { say 'lockstep cannot be built without LibTorch, and neither apt-get nor pip can install it here.'; exit 1; }
      torch=$(torches | sed -n '1s/^[^ ]* //p') ;;
  esac
}

# other_torch VERSION: sets torch and other_version to an installed LibTorch of another release, or to nothing.
other_torch() {
  local line
  torch= other_version=
  while read -r line; do
    [[ ${line%% *} == "${1%.*}".* ]] && continue
    other_version=${line%% *} torch=${line#* }
    return
  done < <(Torch_DIR= CMAKE_PREFIX_PATH= torches)
}

# --- building

cached() { sed -n "s/^$2:[A-Z]*=//p" "$1/CMakeCache.txt" 2>/dev/null; }

# configure FOLDER PRESET TESTS COMMANDS [OPTIONS...]: does nothing when the folder is configured so or better already;
# Ninja itself notices when a CMakeLists.txt has changed.
configure() {
  local folder=$1 preset=$2 tests=$3 commands=$4
  shift 4
  if [ $installed_any = no ] && [ -e "$folder/build.ninja" ] && [ "$(cached "$folder" Torch_DIR)" = "$torch" ] &&
    { [ "$tests" = OFF ] || [ "$(cached "$folder" LOCKSTEP_TESTS)" = ON ]; }; then
    return
  fi
  mkdir -p "$folder"
  cmake --preset "$preset" -B "$folder" -DTorch_DIR="$torch" -DLOCKSTEP_TESTS="$tests" -DLOCKSTEP_COMMANDS="$commands" \
    -Wno-dev "$@" >"$folder/configure.log" 2>&1 || { cat "$folder/configure.log"; exit 1; }
  sed -n '/^-- lockstep /,/^$/p' "$folder/configure.log"
}

# steps_in LOG: "12/40", the last step that Ninja has finished; nothing before the first.
steps_in() { { grep -ao '^\[[0-9]*/[0-9]*\]' "$1" || true; } | tail -n 1 | tr -d '[]'; }

# build FOLDER [TARGETS...]: one line of progress on a terminal. The compiler's output goes to FOLDER/build.log, and the
# first error in it is shown.
build() {
  local folder=$1 begin=$SECONDS line status=0
  shift
  local log=$folder/build.log
  cmake --build "$folder" ${1:+--target "$@"} >"$log" 2>&1 &
  local builder=$!
  trap 'kill "$builder" 2>/dev/null; exit 130' INT TERM
  if [ -t 1 ]; then
    while kill -0 "$builder" 2>/dev/null; do
      line=$(steps_in "$log")
      printf '\r\033[K  %s%d s' "${line:+${line%/*} of ${line#*/} steps, }" $((SECONDS - begin))
      sleep 0.5
    done
    printf '\r\033[K'
  fi
  wait "$builder" || status=$?
  trap - INT TERM
  if [ $status -ne 0 ]; then
    sed -n '/^FAILED:/,$p' "$log" | sed '/^\[.*] Building/d' | head -n 40
    say "The build has failed. The whole log: $log"
    exit $status
  fi
  line=$(steps_in "$log")
  say "Built in $((SECONDS - begin)) s${line:+, ${line#*/} steps}. Log: $log"
}
