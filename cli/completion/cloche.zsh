#compdef cloche
# Completion of cloche for zsh.
_cloche() {
    local line
    local -a found
    while IFS= read -r line; do
        found+=("${${line%%$'\t'*}//:/\\:}:${line#*$'\t'}")
    done < <(cloche __complete -- "${(@)words[2,CURRENT]}" 2>/dev/null)
    if (( $#found )); then
        _describe cloche found
    else
        _files
    fi
}
if [[ $funcstack[1] == _cloche ]]; then
    _cloche "$@"
else
    compdef _cloche cloche
fi
