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
has_debian_module() { /usr/bin/python3 -c "import $1" 2>/dev/null; }  # of a package for Debian's Python
has_mpi() { has_command mpirun && has_command mpicxx; }
has_fashion_mnist() {  # as lockstep::find_dataset finds it
  local folder file
  for folder in ${LOCKSTEP_DATA:+"$LOCKSTEP_DATA/fashion-mnist" "$LOCKSTEP_DATA"} /usr/share/datasets/fashion-mnist; do
    for file in {train,t10k}-{images-idx3,labels-idx1}-ubyte; do
      [ -e "$folder/$file" ] || [ -e "$folder/$file.gz" ] || continue 2
    done
    return
  done
  return 1
}
has_browser() { has_command chromium && has_command chromedriver; }
has_fuzzer() {
  has_command clang++ && [ -n "$(find "$(clang++ -print-resource-dir)" -name "libclang_rt.fuzzer*.a" -print -quit)" ]
}

# need WHAT PACKAGES CHECK...: a part that lockstep cannot be built without. want: an optional part.
part_names=() part_packages=() part_checks=() part_required=() installed_any=no
need() { part_required+=(yes) part_names+=("$1") part_packages+=("$2") part_checks+=("${*:3}"); }
want() { part_required+=(no) part_names+=("$1") part_packages+=("$2") part_checks+=("${*:3}"); }
listed() { printf '%s, ' "$@" | sed 's/, $//'; }

# find_missing: sets missing_required, missing_optional (names of parts) and missing_packages.
find_missing() {
  local i
  missing_required=() missing_optional=() missing_packages=()
  for i in "${!part_names[@]}"; do
    ${part_checks[i]} && continue
    [ "${part_required[i]}" = yes ] && missing_required+=("${part_names[i]}") || missing_optional+=("${part_names[i]}")
    missing_packages+=(${part_packages[i]})
  done
}

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

# Installs missing parts if possible. Stops if a required part stays missing.
install_missing() {
  find_missing
  [ ${#missing_packages[@]} -gt 0 ] || return 0
  say "Missing on this machine: $(listed "${missing_required[@]}" "${missing_optional[@]}")"
  if can_install; then
    say "Installing with apt-get: ${missing_packages[*]}"
    as_root apt-get update -qq 2>/dev/null || true
    # A package that this release does not have must not keep the others out.
    local package known=()
    for package in "${missing_packages[@]}"; do
      apt-cache show "$package" >/dev/null 2>&1 && known+=("$package")
    done
    [ ${#known[@]} -eq 0 ] || apt_install "${known[@]}" || true
    find_missing
    [ ${#missing_packages[@]} -gt 0 ] || return 0
    say "apt-get could not install: $(listed "${missing_required[@]}" "${missing_optional[@]}")"
  else
    say 'They cannot be installed here: there is no apt-get, or no right to use it.'
  fi
  if [ ${#missing_required[@]} -gt 0 ]; then
    say "lockstep cannot be built without: $(listed "${missing_required[@]}")"
    exit 1
  fi
}

# --- Python environments, which all checkouts share

cache=${XDG_CACHE_HOME:-$HOME/.cache}/lockstep

# An environment without the file `complete` is the rest of an interrupted installation.
has_environment() { [ -e "$cache/$1/complete" ] && "$cache/$1/bin/python" -c '' 2>/dev/null; }

# python_for_environments: prints a Python that can create environments; installs Debian's if there is none.
python_for_environments() {
  local python
  for python in python3 /usr/bin/python3; do
    "$python" -c 'import venv, ensurepip' 2>/dev/null && { echo "$python"; return; }
  done
  can_install && { as_root apt-get update -qq >&2 || true; } && apt_install python3-venv >&2 && echo /usr/bin/python3
}

# make_environment NAME PACKAGES...: an environment with these packages of PyPI.
make_environment() {
  local name=$1 python
  shift
  python=$(python_for_environments) || return 1
  say "Installing with pip: $*, into $cache/$name"
  rm -rf "${cache:?}/$name"
  "$python" -m venv "$cache/$name" &&
    "$cache/$name/bin/pip" install -q --disable-pip-version-check --retries 2 --timeout 30 "$@" &&
    touch "$cache/$name/complete" && return
  rm -rf "${cache:?}/$name"
  say "pip could not download or install: $*"
  return 1
}

# install_environment NAME PACKAGES...: the same, unless the environment exists. Only one checkout installs at a time.
install_environment() {
  has_environment "$1" && return
  mkdir -p "$cache"
  (flock 9 && { has_environment "$1" || make_environment "$@"; }) 9>"$cache/$1.lock" && installed_any=yes
}

# TensorBoard reads the event files that the tests write.
install_tensorboard() { install_environment tensorboard tensorboard; }

# --- LibTorch

# tested_torch SOURCE: the newest tested version from there: debian or wheel.
tested_torch() { sed -n "s/^\([0-9.]*\) $1\$/\1/p" tested_torch_versions.txt | tail -n 1; }
# The tested releases: "1.13, 2.11 and 2.15".
tested_torch_releases() {
  sed -n 's/^\([0-9]*\.[0-9]*\)\..*/\1/p' tested_torch_versions.txt | paste -sd, | sed 's/,/, /g; s/\(.*\), /\1 and /'
}
torch_is_tested() { grep -q "^${1%.*}\." tested_torch_versions.txt; }  # torch_is_tested VERSION

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

# PyTorch's wheel. With CUDA's libraries, which it depends on, it takes 5 GB.
install_torch_wheel() { install_environment "torch-$1" "torch==$1" numpy; }  # install_torch_wheel VERSION

# choose_torch HOW: sets torch to the folder of TorchConfig.cmake. HOW is debian, wheel, wheel=VERSION, a path, or
# nothing: what is installed, in the order of cmake/LockstepFindTorch.cmake.
choose_torch() {
  local version
  case $1 in
    debian)
      torch=$(torch_in /usr) || { install_torch_debian && torch=$(torch_in /usr); } ||
        { say "Debian's LibTorch cannot be installed here."; exit 1; } ;;
    wheel | wheel=*)
      version=${1#wheel} version=${version#=}
      [ -n "$version" ] || version=$(tested_torch wheel)
      install_torch_wheel "$version" && torch=$(torch_in "$cache/torch-$version") ||
        { say "PyTorch's wheel $version cannot be installed here."; exit 1; } ;;
    ?*)
      torch=$(torch_in "$1") || { say "--torch $1: there is no TorchConfig.cmake in it."; exit 1; } ;;
    *)
      torch=$(torches | sed -n '1s/^[^ ]* //p')
      [ -n "$torch" ] || install_torch_debian || install_torch_wheel "$(tested_torch wheel)" ||
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
  local fresh=()
  [ "$(cached "$folder" Torch_DIR)" = "$torch" ] || fresh=(--fresh)  # what was found depends on the LibTorch
  cmake --preset "$preset" "${fresh[@]}" -B "$folder" -DTorch_DIR="$torch" -DLOCKSTEP_TESTS="$tests" -DLOCKSTEP_COMMANDS="$commands" \
    -Wno-dev "$@" >"$folder/configure.log" 2>&1 || { cat "$folder/configure.log"; exit 1; }
  sed -n '/^-- lockstep /,/^$/p' "$folder/configure.log"
}

# steps_in LOG: "12/40", the last step that Ninja has finished; nothing before the first.
steps_in() { { grep -ao '^\[[0-9]*/[0-9]*\]' "$1" || true; } | tail -n 1 | tr -d '[]'; }

# build FOLDER [TARGETS...]: one line of progress on a terminal. The compiler's output goes to FOLDER/build.log, and the
# first error in it is shown.
build() {
  local folder=$1 begin=$SECONDS line status=0 version
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
    { sed -n '/^FAILED:/,$p' "$log" | sed '/^\[.*] Building/d' | head -n 40; } || true  # head ends before sed does
    say "The build has failed. The whole log: $log"
    version=$(cat "$folder/torch_version.txt")
    torch_is_tested "$version" ||
      say "LibTorch $version is not tested with lockstep. The tested releases are $(tested_torch_releases);" \
        '--torch wheel uses the newest.'
    return $status
  fi
  line=$(steps_in "$log")
  say "Built in $((SECONDS - begin)) s${line:+, ${line#*/} steps}. Log: $log"
}
