{{- /*
SPDX-FileCopyrightText: The Partage Authors
SPDX-License-Identifier: Apache-2.0
*/ -}}

{{- /* What the schema cannot say. Each message names the value and the way out. */ -}}
{{- define "partage.validate" -}}

{{- if not (.Capabilities.APIVersions.Has "resource.k8s.io/v1") -}}
{{- fail "this cluster does not serve resource.k8s.io/v1: dynamic resource allocation is turned off, or the API server was started with --runtime-config=resource.k8s.io/v1=false" -}}
{{- end -}}

{{- if and (not .Values.serviceAccount.create) (not .Values.serviceAccount.name) -}}
{{- fail "serviceAccount.create is false, so serviceAccount.name must say which ServiceAccount to use; the default one would give every pod of the namespace the plugin's rights" -}}
{{- end -}}

{{- $classes := dict "gpu.nvidia.com" .Values.deviceClasses.gpu "mps.partage.dev" .Values.deviceClasses.mps "timeslice.partage.dev" .Values.deviceClasses.timeslice -}}
{{- range $name, $class := .Values.deviceClasses.migProfiles -}}
{{- if or (hasKey $classes $name) (eq $name "mig.nvidia.com") -}}
{{- fail (printf "deviceClasses.migProfiles: %s is a class of this chart already, choose another name" $name) -}}
{{- end -}}
{{- $_ := set $classes $name $class -}}
{{- end -}}
{{- $claimed := dict -}}
{{- range $name, $class := $classes -}}
{{- with $class.extendedResourceName -}}
{{- if hasKey $claimed . -}}
{{- fail (printf "deviceClasses: %s and %s both have extendedResourceName %s; the scheduler would use only one of them" (get $claimed .) $name .) -}}
{{- end -}}
{{- $_ := set $claimed . $name -}}
{{- end -}}
{{- end -}}

{{- if not .Values.mpsSupervisor.enabled -}}
{{- $offers := dict "default" (.Values.sharingPolicy.default | default dict) -}}
{{- range .Values.sharingPolicy.rules -}}
{{- $_ := set $offers (printf "rules: %s" .name) .offer -}}
{{- end -}}
{{- range $where, $offer := $offers -}}
{{- $kinds := $offer.kinds | default (list "mps") -}}
{{- range dig "mig" "shares" list $offer -}}
{{- if hasKey . "mps" -}}
{{- $kinds = append $kinds "mps" -}}
{{- end -}}
{{- end -}}
{{- if has "mps" $kinds -}}
{{- fail (printf "mpsSupervisor.enabled is false, but sharingPolicy (%s) offers mps, which nobody could use; name the other kinds in its \"kinds\"" $where) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* The same limits as in the programs, which would end when they start. */ -}}
{{- $durations := list
  (list "kubeletPlugin.nvmlCallLimit" .Values.kubeletPlugin.nvmlCallLimit 45 "45s, for the kubelet waits no longer")
  (list "kubeletPlugin.pollInterval" .Values.kubeletPlugin.pollInterval 3600 "1h")
  (list "kubeletPlugin.reconcileInterval" .Values.kubeletPlugin.reconcileInterval 3600 "1h")
  (list "kubeletPlugin.orphanGrace" .Values.kubeletPlugin.orphanGrace 86400 "24h")
  (list "mpsSupervisor.checkInterval" .Values.mpsSupervisor.checkInterval 60 "1m")
-}}
{{- range $durations -}}
{{- $seconds := include "partage.seconds" (index . 1) | float64 -}}
{{- if or (lt $seconds 0.05) (gt $seconds (float64 (index . 2))) -}}
{{- fail (printf "%s is %s: want a time from 50ms to %s" (index . 0) (index . 1) (index . 3)) -}}
{{- end -}}
{{- end -}}

{{- $mounts := list "/driver-root" "/etc/partage" (clean .Values.host.mpsDir) (clean .Values.host.cdiDir) (include "partage.registrarDir" .) -}}
{{- range .Values.kubeletPlugin.extraVolumeMounts -}}
{{- if has (clean .mountPath) $mounts -}}
{{- fail (printf "kubeletPlugin.extraVolumeMounts: %s hides what the plugin needs at %s" .name .mountPath) -}}
{{- end -}}
{{- end -}}
{{- range .Values.mpsSupervisor.extraVolumeMounts -}}
{{- if has (clean .mountPath) (list "/driver-root" (clean $.Values.host.mpsDir)) -}}
{{- fail (printf "mpsSupervisor.extraVolumeMounts: %s hides what the supervisor needs at %s" .name .mountPath) -}}
{{- end -}}
{{- end -}}

{{- end -}}
