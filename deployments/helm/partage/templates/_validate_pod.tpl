{{- /*
SPDX-FileCopyrightText: The Partage Authors
SPDX-License-Identifier: Apache-2.0
*/ -}}

{{- /*
What users add to a DaemonSet must not repeat what the chart sets: of two entries with
one name the API server takes the last one, or none. Arguments: object, the parsed
DaemonSet; labels, those that the chart sets; values, the name of its section of values,
and extra, the section; program, what people call it.
*/ -}}
{{- define "partage.validatePod" -}}
{{- $values := .values -}}
{{- $labels := append (keys (fromYaml .labels)) "app.kubernetes.io/component" -}}
{{- range $key, $_ := .extra.podLabels -}}
{{- if has $key $labels -}}
{{- fail (printf "%s.podLabels: %s is a label that the chart sets; choose another one" $values $key) -}}
{{- end -}}
{{- end -}}
{{- if hasKey (default dict .extra.podAnnotations) "kubectl.kubernetes.io/default-container" -}}
{{- fail (printf "%s.podAnnotations: kubectl.kubernetes.io/default-container is an annotation that the chart sets; choose another one" $values) -}}
{{- end -}}
{{- with .object.Error -}}
{{- fail (printf "%s: its values make no valid DaemonSet: %s" $values .) -}}
{{- end -}}

{{- $pod := .object.spec.template.spec -}}
{{- $container := first $pod.containers -}}
{{- range list (list "extraEnv" $container.env .extra.extraEnv) (list "extraVolumes" $pod.volumes .extra.extraVolumes) -}}
{{- $field := index . 0 -}}
{{- $extra := index . 2 -}}
{{- $count := dict -}}
{{- range index . 1 -}}
{{- $_ := set $count .name (add1 (default 0 (get $count .name))) -}}
{{- end -}}
{{- range $extra -}}
{{- if gt (int (get $count .name)) 1 -}}
{{- fail (printf "%s.%s: %s is set by the chart or there twice; remove it or choose another name" $values $field .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- $volumes := list -}}
{{- range $pod.volumes -}}
{{- $volumes = append $volumes .name -}}
{{- end -}}
{{- $paths := dict -}}
{{- range $container.volumeMounts -}}
{{- $_ := set $paths (clean .mountPath) (add1 (default 0 (get $paths (clean .mountPath)))) -}}
{{- end -}}
{{- $program := .program -}}
{{- range .extra.extraVolumeMounts -}}
{{- if gt (int (get $paths (clean .mountPath))) 1 -}}
{{- fail (printf "%s.extraVolumeMounts: %s hides what the %s needs at %s, or is there twice; choose another mountPath" $values .name $program .mountPath) -}}
{{- end -}}
{{- if not (has .name $volumes) -}}
{{- fail (printf "%s.extraVolumeMounts: there is no volume %s; add it to %s.extraVolumes" $values .name $values) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* The quantities of resources. Arguments: where they are, and they. */ -}}
{{- define "partage.validateResources" -}}
{{- $where := index . 0 -}}
{{- $resources := default dict (index . 1) -}}
{{- range $list, $quantities := pick $resources "requests" "limits" -}}
{{- range $name, $quantity := $quantities -}}
{{- $at := printf "%s.%s.%s" $where $list $name -}}
{{- $text := toString $quantity -}}
{{- if not (or (has $name (list "cpu" "memory" "ephemeral-storage")) (hasPrefix "hugepages-" $name) (contains "/" $name)) -}}
{{- fail (printf "%s: want cpu, memory, ephemeral-storage, hugepages-<size> or the name of an extended resource" $at) -}}
{{- end -}}
{{- if not (regexMatch "^[0-9]+(\\.[0-9]+)?([KMGTPE]i|[mkMGTPE]|[eE][+-]?[0-9]+)?$" $text) -}}
{{- fail (printf "%s is %s: want a quantity such as %s" $at $text (ternary "500m or 2" "64Mi or 1Gi" (eq $name "cpu"))) -}}
{{- end -}}
{{- if and (ne $name "cpu") (hasSuffix "m" $text) -}}
{{- fail (printf "%s is %s, which is thousandths: want a quantity such as %si" $at $text (replace "m" "M" $text)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $limits := default dict $resources.limits -}}
{{- range $name, $request := default dict $resources.requests -}}
{{- if hasKey $limits $name -}}
{{- $limit := get $limits $name -}}
{{- if gt (include "partage.quantity" $request | float64) (include "partage.quantity" $limit | float64) -}}
{{- fail (printf "%s.requests.%s is %v, more than %s.limits.%s (%v): want at most the limit" $where $name $request $where $name $limit) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* A quantity as a number. */ -}}
{{- define "partage.quantity" -}}
{{- $text := toString . -}}
{{- $units := dict "" 1.0 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 "Ei" 1152921504606846976.0 -}}
{{- $unit := regexFind "([KMGTPE]i|[mkMGTPE])$" $text -}}
{{- mulf (float64 (trimSuffix $unit $text)) (get $units $unit) -}}
{{- end -}}
