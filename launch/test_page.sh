#!/usr/bin/env bash
# Tests of the report's pages in a headless Chromium: bash launch/test_page.sh [pytest's arguments ...]
# Debian's package is installed if it is missing, which needs root. SPMDRL_PICTURES=FOLDER keeps pictures of the pages.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

prepare_environment dev
has_browser() {
    command -v chromium || command -v chromium-browser || command -v google-chrome
}
if ! has_browser > /dev/null; then
    say "installing chromium"
    { apt-get -qq update && apt-get -qq install --yes --no-install-recommends chromium > /dev/null; } || {
        printf '== page tests LEFT OUT: Chromium could not be installed here\n'
        exit 69
    }
fi
share_cores 2
exec .venv/bin/pytest tests/observability/test_page.py "$@"
