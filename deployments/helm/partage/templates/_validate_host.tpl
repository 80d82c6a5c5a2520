{{- /*
SPDX-FileCopyrightText: The Partage Authors
SPDX-License-Identifier: Apache-2.0
*/ -}}

{{- /*
Paths on the host. Folders that the DaemonSets write to are mounted at the same path in the
containers, so they must hide nothing there either. Argument: the section host.
*/ -}}
{{- define "partage.validateHost" -}}
{{- $host := . -}}
{{- range $name, $path := $host -}}
{{- $mayBeAuto := eq $name "devRoot" -}}
{{- if and $mayBeAuto (eq $path "auto") -}}
{{- else if or (not (regexMatch `^/[^\s:]*$` $path)) (regexMatch `(^|/)\.\.(/|$)` $path) -}}
{{- fail (printf "host.%s is %q: want %sa path that begins with / and has no .., blanks and colons" $name $path (ternary "auto, or " "" $mayBeAuto)) -}}
{{- end -}}
{{- end -}}
{{- $shared := list "/bin" "/boot" "/etc" "/home" "/lib" "/lib64" "/media" "/mnt" "/opt" "/root" "/run" "/sbin" "/srv" "/tmp" "/usr" "/var" "/var/cache" "/var/lib" "/var/log" "/var/run" "/var/tmp" -}}
{{- $taken := list "/dev" "/proc" "/sys" "/bin" "/boot" "/lib" "/lib64" "/sbin" "/usr" "/etc/partage" "/run/health" "/var/run/secrets" "/driver-root" "/dev-root" "/pod-logs" "/proc-root" "/sys-root" -}}
{{- range list "cdiDir" "kubeletDir" "mpsDir" -}}
{{- $name := . -}}
{{- $path := clean (get $host $name) -}}
{{- if or (eq $path "/") (has $path $shared) -}}
{{- fail (printf "host.%s is %s, which others use, too: want a folder of its own, such as %s" $name $path (include "partage.exampleFolder" $name)) -}}
{{- end -}}
{{- range $taken -}}
{{- if eq (include "partage.within" (list $path .)) "true" -}}
{{- fail (printf "host.%s is %s: want a folder that is not in %s, such as %s" $name $path . (include "partage.exampleFolder" $name)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- $pairs := list (list "cdiDir" "mpsDir") (list "cdiDir" "kubeletDir") (list "mpsDir" "kubeletDir") -}}
{{- if ne (clean $host.driverRoot) "/" -}}
{{- $pairs = concat $pairs (list (list "cdiDir" "driverRoot") (list "mpsDir" "driverRoot")) -}}
{{- end -}}
{{- range $pairs -}}
{{- $first := index . 0 -}}
{{- $second := index . 1 -}}
{{- $paths := list (get $host $first) (get $host $second) -}}
{{- if or (eq (include "partage.within" $paths) "true") (eq (include "partage.within" (reverse $paths)) "true") -}}
{{- fail (printf "host.%s is %s and host.%s is %s: want two folders of which none is in the other, such as %s for host.%s" $first (get $host $first) $second (get $host $second) (include "partage.exampleFolder" $first) $first) -}}
{{- end -}}
{{- end -}}

{{- range list "driverRoot" "devRoot" -}}
{{- $name := . -}}
{{- $path := clean (get $host $name) -}}
{{- range list "/dev" "/etc" "/proc" "/sys" -}}
{{- if eq (include "partage.within" (list $path .)) "true" -}}
{{- fail (printf "host.%s is %s: want the folder that has %s in it, such as / or /run/nvidia/driver" $name $path (ternary "dev/" "usr/" (eq $name "devRoot"))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* The default of a folder, as an example. Argument: its name in the section host. */ -}}
{{- define "partage.exampleFolder" -}}
{{- get (dict "cdiDir" "/var/run/cdi" "kubeletDir" "/var/lib/kubelet" "mpsDir" "/run/partage/mps") . -}}
{{- end -}}

{{- /* "true" if a path is another one or in it. /var/run is /run on all hosts. Arguments: the two. */ -}}
{{- define "partage.within" -}}
{{- $inner := printf "%s/" (clean (index . 0)) -}}
{{- $outer := printf "%s/" (clean (index . 1)) -}}
{{- hasPrefix (regexReplaceAll "^/var/run/" $outer "/run/") (regexReplaceAll "^/var/run/" $inner "/run/") -}}
{{- end -}}
