{{- /*
SPDX-FileCopyrightText: The Partage Authors
SPDX-License-Identifier: Apache-2.0
*/ -}}

{{- /* "true" if objects for monitoring are wanted. Arguments: the root; Auto, Always or Never. */ -}}
{{- define "partage.monitoring" -}}
{{- $root := index . 0 -}}
{{- $create := index . 1 -}}
{{- or (eq $create "Always") (and (eq $create "Auto") $root.Values.metrics.enabled ($root.Capabilities.APIVersions.Has "monitoring.coreos.com/v1")) -}}
{{- end -}}

{{- /* The groups of rules/partage.yaml for this release, without the alerts that are not wanted. */ -}}
{{- define "partage.alertGroups" -}}
{{- $text := .Files.Get "rules/partage.yaml" -}}
{{- $text = $text | replace "namespace=\"partage\"" (printf "namespace=\"%s\"" .Release.Namespace) -}}
{{- range list "gpu-kubelet-plugin" "mps-supervisor" -}}
{{- $text = $text | replace (printf "partage-%s" .) (printf "%s-%s" (include "partage.fullname" $) .) -}}
{{- end -}}
{{- $disabled := default list .Values.alerts.disabled -}}
{{- $known := list -}}
{{- $groups := list -}}
{{- range (fromYaml $text).groups -}}
{{- $rules := list -}}
{{- range .rules -}}
{{- $known = append $known .alert -}}
{{- if not (has .alert $disabled) -}}
{{- $rules = append $rules . -}}
{{- end -}}
{{- end -}}
{{- if $rules -}}
{{- $groups = append $groups (dict "name" .name "rules" $rules) -}}
{{- end -}}
{{- end -}}
{{- range $disabled -}}
{{- if not (has . $known) -}}
{{- fail (printf "alerts.disabled: there is no alert %s; there are %s" . (join ", " $known)) -}}
{{- end -}}
{{- end -}}
{{- toYaml $groups -}}
{{- end -}}
