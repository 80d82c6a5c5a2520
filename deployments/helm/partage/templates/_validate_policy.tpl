{{- /*
SPDX-FileCopyrightText: The Partage Authors
SPDX-License-Identifier: Apache-2.0
*/ -}}

{{- /*
What the schema cannot say of a sharing policy. The plugin would refuse the file, see
pkg/policy, and publish nothing new.
*/ -}}
{{- define "partage.validatePolicy" -}}
{{- $names := dict -}}
{{- range $n, $rule := .rules -}}
{{- $at := printf "sharingPolicy.rules[%d]" $n -}}
{{- if hasKey $names $rule.name -}}
{{- fail (printf "%s.name is %s, as of another rule; want a name of its own" $at $rule.name) -}}
{{- end -}}
{{- $_ := set $names $rule.name true -}}
{{- include "partage.validateMatch" (list (printf "%s.match" $at) $rule.match) -}}
{{- range $m, $earlier := slice $.rules 0 $n -}}
{{- $covers := true -}}
{{- range $field, $value := $earlier.match -}}
{{- $special := lower (default "" (get $rule.match $field)) -}}
{{- if not (or (eq (lower $value) $special) (and (eq $field "productName") (eq (include "partage.coversGlob" (list (lower $value) $special)) "true"))) -}}
{{- $covers = false -}}
{{- end -}}
{{- end -}}
{{- if $covers -}}
{{- fail (printf "%s %q never counts: rule %q comes first and matches all of these GPUs; put the special rule before the general one, or remove it" $at $rule.name $earlier.name) -}}
{{- end -}}
{{- end -}}
{{- include "partage.validateOffer" (list (printf "%s.offer" $at) $rule.offer) -}}
{{- end -}}
{{- include "partage.validateOffer" (list "sharingPolicy.default" (default dict .default)) -}}
{{- include "partage.validateHealth" (default dict .health) -}}
{{- end -}}

{{- define "partage.validateHealth" -}}
{{- with .quietPeriod -}}
{{- $seconds := include "partage.seconds" . | float64 -}}
{{- if or (lt $seconds 1.0) (gt $seconds 86400.0) -}}
{{- fail (printf "sharingPolicy.health.quietPeriod is %s: want a time from 1s to 24h" .) -}}
{{- end -}}
{{- end -}}
{{- range $list, $key := dict "xids" "xid" "conditions" "condition" -}}
{{- $seen := dict -}}
{{- range $n, $entry := index $ $list -}}
{{- $value := get $entry $key | toString -}}
{{- if hasKey $seen $value -}}
{{- fail (printf "sharingPolicy.health.%s[%d].%s is %s, as of another entry; want each once" $list $n $key $value) -}}
{{- end -}}
{{- $_ := set $seen $value true -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /*
"true" if a glob certainly matches every name that another one matches, as the plugin finds
it out. Arguments: the general glob and the special one, in lower case.
*/ -}}
{{- define "partage.coversGlob" -}}
{{- $general := index . 0 -}}
{{- $special := index . 1 -}}
{{- if not (trimAll "*" $general) -}}
true
{{- else if and $special (not (regexMatch `[?[\\]` $general)) (not (regexMatch `[[\\]` $special)) -}}
{{- regexMatch (printf "(?s)^%s$" (regexQuoteMeta $general | replace `\*` ".*")) $special -}}
{{- end -}}
{{- end -}}

{{- /* Arguments: where the match is, and it. */ -}}
{{- define "partage.validateMatch" -}}
{{- $at := index . 0 -}}
{{- $match := index . 1 -}}
{{- with $match.architecture -}}
{{- $architectures := list "Kepler" "Maxwell" "Pascal" "Volta" "Turing" "Ampere" "Ada Lovelace" "Hopper" "Blackwell" "Rubin" -}}
{{- $known := false -}}
{{- range $architectures -}}
{{- $known = or $known (eq (lower .) (lower $match.architecture)) -}}
{{- end -}}
{{- if not $known -}}
{{- fail (printf "%s.architecture is %s: want one of %s" $at . (join ", " $architectures)) -}}
{{- end -}}
{{- end -}}
{{- with $match.productName -}}
{{- if not (regexMatch `(?s)^([^\\[]|\\.|\[\^?(([^]\\-]|\\.)(-([^]\\-]|\\.))?)+\])*$` .) -}}
{{- fail (printf "%s.productName is %s: want a pattern such as \"NVIDIA A100*\": '*' stands for any text, '?' for one character, '[…]' for one of some, '\\' takes the meaning from the next one" $at .) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Arguments: where the offer is, and it. */ -}}
{{- define "partage.validateOffer" -}}
{{- $at := index . 0 -}}
{{- $offer := index . 1 -}}
{{- if hasKey $offer "kinds" -}}
{{- range list "mig" "mps" "timeslice" -}}
{{- if and (hasKey $offer .) (not (has . $offer.kinds)) -}}
{{- fail (printf "%s.%s: %q is not among the kinds that are offered (%s); add it there or remove this section" $at . . (default "none" (join ", " $offer.kinds))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $mig := default dict $offer.mig -}}
{{- if and (hasKey $mig "profiles") (not $mig.profiles) (not (hasKey $mig "shares")) -}}
{{- fail (printf "%s.mig.profiles is empty: want at least one, or \"shares\", which are then all that is offered; leave \"mig\" out of the kinds to offer no partitions" $at) -}}
{{- end -}}
{{- $taken := dict -}}
{{- range $n, $shares := $mig.shares -}}
{{- range $shares.profiles -}}
{{- if hasKey $taken . -}}
{{- fail (printf "%s.mig.shares[%d].profiles: %s is shared in two ways; name it once" $at $n .) -}}
{{- end -}}
{{- $_ := set $taken . true -}}
{{- end -}}
{{- include "partage.validateMemory" (list (printf "%s.mig.shares[%d].mps" $at $n) $shares.mps) -}}
{{- end -}}
{{- include "partage.validateMemory" (list (printf "%s.mps" $at) $offer.mps) -}}
{{- end -}}

{{- /* Arguments: where the section mps is, and it. */ -}}
{{- define "partage.validateMemory" -}}
{{- $at := index . 0 -}}
{{- $mps := default dict (index . 1) -}}
{{- range list "reservedMemory" "serverMemory" "contextMemory" -}}
{{- $text := toString (default 0 (get $mps .)) -}}
{{- if gt (include "partage.quantity" $text | float64) 1099511627776.0 -}}
{{- fail (printf "%s.%s is %s: want at most 1Ti" $at . $text) -}}
{{- end -}}
{{- end -}}
{{- end -}}
