# Completion of cloche for bash.
_cloche() {
    local line word
    COMPREPLY=()
    while IFS= read -r line; do
        word=${line%%$'\t'*}
        COMPREPLY+=("$word")
        # A name that ends in a colon goes on with a path.
        [[ $word == *: ]] && compopt -o nospace
    done < <(cloche __complete -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
}
complete -o default -F _cloche cloche
