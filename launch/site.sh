#!/usr/bin/env bash
# The documentation as a site, in build/site: bash launch/site.sh [serve]
# mkdocs-material, the extra `docs` of setup.cfg, is installed in .venv-site. A warning or a dead link fails the build.
# SPMDRL_REPOSITORY=https://HOST/OWNER/NAME/blob/main links files that the site doesn't have; else they are only named.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=.venv-site
source launch/environment.sh

# Without spmdrl and PyTorch, which pages don't need: the generated ones are in git, and tests compare them with the code.
wanted=$(sed -n 's/^ *\(mkdocs-material[<>=].*\)$/\1/p' setup.cfg)
if [ "$(cat "$venv/installed-docs" 2> /dev/null)" != "$wanted" ]; then
    "$(find_python)" -m venv --clear "$venv"
    say "installing $wanted in $venv"
    pip_install "$wanted" || {
        printf '== the site LEFT OUT: mkdocs-material could not be installed here\n'
        exit 69
    }
    echo "$wanted" > "$venv/installed-docs"
fi
if [ "${1:-}" = serve ]; then
    exec "$venv/bin/mkdocs" serve --config-file launch/site/mkdocs.yml
fi
# Its note that the theme is maintained until May 2027 is no warning about a page.
export NO_MKDOCS_2_WARNING=1
mkdir -p build
"$venv/bin/mkdocs" build --strict --clean --config-file launch/site/mkdocs.yml > build/site.log 2>&1 || {
    grep -v '^INFO' build/site.log >&2
    exit 1
}
"$venv/bin/python" launch/site/dead_links.py build/site
