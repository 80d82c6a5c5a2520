// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"errors"
	"strconv"
)

func AsError(text string) error {
	if text == "" {
		return nil
	}
	return errors.New(text)
}

func Itoa(i int) string { return strconv.Itoa(i) }
